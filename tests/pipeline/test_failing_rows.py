"""Finds the failing records of a batch."""

import io
import itertools

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn
from PIL import Image

from dalijax.core.pipeline.failing_rows import failing_rows, failure_alone, find_bad
from dalijax.core.pipeline.failure import Cause, Failure, cause_of
from dalijax.core.pipeline.runner import Runner


@pytest.fixture(scope="module")
def image_bytes():
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, "WEBP")
    return file.getvalue()


def decoder(images):
    """Returns a pipeline that decodes the contents of files."""
    arrays = [np.frombuffer(image, np.uint8) for image in images]
    pipeline = Pipeline(len(images), num_threads=2, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        data = fn.external_source(source=lambda: arrays)
        pipeline.set_outputs(fn.decoders.image(data))
    pipeline.build()
    return pipeline


def subsets(count):
    every = range(count)
    return itertools.chain.from_iterable(
        itertools.combinations(every, size) for size in range(count + 1)
    )


@pytest.mark.parametrize("count", range(9))
def test_failing_records_are_found_in_order(count):
    for bad in subsets(count):
        asked = []

        def succeed(rows, bad=bad, asked=asked):
            asked.append(list(rows))
            return not {*rows} & {*bad}

        assert failing_rows(count, succeed) == list(bad)
        assert all(asked)
        assert len(asked) == len({tuple(rows) for rows in asked})


def test_the_search_ends_at_the_limit():
    for bad in subsets(7):
        found = failing_rows(7, lambda rows, bad=bad: not {*rows} & {*bad}, most=2)
        assert found == list(bad)[:2]


@pytest.mark.parametrize("named", ("first", "last", "wrong", "none"))
def test_the_named_record_is_run_first(named):
    for bad in subsets(8):
        asked = []

        def succeed(rows, bad=bad, asked=asked):
            asked.append(list(rows))
            return not {*rows} & {*bad}

        def suspect(bad=bad, asked=asked):
            places = [place for place, row in enumerate(asked[-1]) if row in bad]
            good = [place for place, row in enumerate(asked[-1]) if row not in bad]
            choices = {"first": places[:1], "last": places[-1:], "wrong": good[:1], "none": []}
            return next(iter(choices[named]), None)

        assert failing_rows(8, succeed, suspect=suspect) == list(bad)
        if named in ("first", "last"):
            assert len(asked) <= 3 * len(bad) + 1


@pytest.mark.parametrize("bad", ([5], [0, 63], [3, 4, 5, 40]))
def test_dali_names_the_record_that_it_cannot_decode(bad, image_bytes):
    images = [image_bytes[:-500] if row in bad else image_bytes for row in range(64)]
    asked = []

    def run(rows):
        asked.append(list(rows))
        return failure_alone(Runner([decoder([images[row] for row in rows])]))

    failure = run(range(64))
    assert failure is not None
    asked.clear()
    assert find_bad(64, run, failure) == bad
    assert len(asked) <= 3 * len(bad) + 1


FLIP = Failure("flip", "wrong type", environment=False)
DECODE = Failure("decoders.image", "broken", environment=False)
WINDOW = Failure("decoders.image_slice", "cropping window out of bounds", environment=False)
READ = Failure("io.file.read", "no such file", environment=False)


@pytest.mark.parametrize(
    ("failure", "num_bad", "has_unread", "works_elsewhere", "cause"),
    (
        (FLIP, 4, False, False, Cause.GRAPH),
        (FLIP, 4, True, False, Cause.GRAPH),
        (FLIP, 4, False, True, Cause.RECORDS),
        (FLIP, 1, False, None, Cause.RECORDS),
        (FLIP, 0, True, None, Cause.RECORDS),
        (FLIP, 0, False, None, Cause.UNKNOWN),
        (WINDOW, 4, False, False, Cause.GRAPH),
        (WINDOW, 0, False, None, Cause.UNKNOWN),
        (DECODE, 4, False, None, Cause.RECORDS),
        (DECODE, 1, False, None, Cause.RECORDS),
        (DECODE, 0, True, None, Cause.RECORDS),
        (DECODE, 0, False, None, Cause.UNKNOWN),
        (READ, 4, False, None, Cause.RECORDS),
        (READ, 0, True, None, Cause.RECORDS),
        (READ, 0, False, None, Cause.ENVIRONMENT),
    ),
)
def test_the_cause_of_a_failure(failure, num_bad, has_unread, works_elsewhere, cause):
    """``works_elsewhere`` is None where further records must not be tried, which takes long."""
    asked = []

    def works():
        asked.append(works_elsewhere)
        return works_elsewhere

    assert cause_of(failure, num_bad, 4, has_unread, works) is cause
    assert asked == ([] if works_elsewhere is None else [works_elsewhere])
