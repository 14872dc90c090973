"""The queue of batches that were read from a stream, against a list of the whole stream."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalijax.core.feeding.record_reader import ReadError, RecordBatch, RecordPosition
from dalijax.core.feeding.record_supply import ReplayQueue


class Stream:
    """Reads a list of items: the number of a batch, or None for a record that can't be read.

    Attributes:
        next: The index of the next item to read.
        after: The description of the position before each item, and of the end.
    """

    def __init__(self, items):
        self.items, self.next = items, 0
        self.after = [None, *(object() for _ in items)]

    def next_records(self):
        if self.next == len(self.items):
            raise StopIteration
        self.next += 1
        if self.items[self.next - 1] is None:
            raise ReadError(self.after[self.next])
        return RecordBatch([self.items[self.next - 1]], self.after[self.next], str)

    def seek(self, position):
        self.next = self.after.index(position.after)


ITEMS = st.lists(st.one_of(st.integers(0, 99), st.none()), max_size=8)
NAMES = ("read", "read", "forget", "pass over", "restart", "seek", "move", "clear")


@given(ITEMS, st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 8)), max_size=30))
def test_a_queue_returns_the_batches_of_the_stream(items, calls):
    stream = Stream(items)
    queue = ReplayQueue(stream)
    first = step = 0  # the item and the step at which the queue begins
    tried = 0  # the number of items from there on that were asked for

    def here():
        return RecordPosition(step, stream.after[first])

    def ahead():
        """Returns the items up to the first that is not a batch."""
        bad = [k for k, item in enumerate(items) if k >= first and item is None]
        return items[first : min(bad, default=len(items))]

    def result(call):
        """Returns the number of a batch or another result, or the class of an error."""
        try:
            value = call()
            return value.records[0] if isinstance(value, RecordBatch) else value
        except (StopIteration, ReadError) as error:
            return type(error)

    for name, number in calls:
        batches = ahead()
        end = StopIteration if first + len(batches) == len(items) else ReadError
        if name == "read":
            tried = max(tried, number + 1)
            want = batches[number] if number < len(batches) else end
            for _ in range(2):  # new pipelines ask for the same batch again
                assert result(functools.partial(queue.read, step + number)) == want
        elif name == "forget":
            dropped = min(number + 1, len(batches), tried)
            queue.forget(step + number)
            first, step, tried = first + dropped, step + dropped, tried - dropped
        elif name == "pass over" and not batches and end is ReadError:
            with pytest.raises(ReadError) as error:
                queue.read(step)
            queue.pass_over(error.value)
            first, tried = first + 1, 0
        elif name == "restart":
            queue.ended = False
        elif name in ("seek", "move", "clear"):
            first, step, tried = min(number, len(items)), number, 0
            queue.clear()
            assert not queue.begins_at(here())
            if name == "move":
                stream.seek(here())
                queue.moved_to(here())
            elif name == "seek":
                queue.seek(here())
            else:  # reading moves the cleared queue
                tried, count = 2, len(ahead())
                failed = count == 0 and first < len(items)
                want = ReadError if failed else step + min(count, 2)
                assert result(functools.partial(queue.read_ahead, here(), 2)) == want
        assert queue.step == step and queue.begins_at(here())
        # No batch is read twice or too early. An error takes the place of an item.
        assert stream.next == min(first + min(tried, len(ahead()) + 1), len(items))
