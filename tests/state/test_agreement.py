"""Descriptions of iterators: their counterparts in other processes, and their differences."""

import itertools
import random

from dalijax.core.state.agreement import (
    Batches,
    Offer,
    absence_text,
    counterparts,
    departure_text,
    described,
    without_seeds,
)


def offer(process, number=0, **values):
    return Offer(process, number, {"function": "f", **values})


def test_counterparts_do_not_depend_on_the_order_of_iterators():
    """Each process has created the same iterators in its own order."""
    for orders in itertools.product(itertools.permutations("abc"), repeat=3):
        offers = [
            offer(p, k, records=name)
            for p, order in enumerate(orders)
            for k, name in enumerate(order)
        ]
        for own in offers:
            found = counterparts(own, random.Random(0).sample(offers, len(offers)), range(3))
            assert not found.different and not found.absent
            assert {o.values["records"] for o in found.offers.values()} == {own.values["records"]}


def test_an_iterator_that_equals_another_of_this_process_is_not_a_counterpart():
    train, evaluation = offer(0, records=20), offer(0, 1, records=5)
    found = counterparts(train, [train, evaluation, offer(1, records=5)], range(2))
    assert found.absent == (1,) and not found.different


def test_the_closest_iterator_is_the_counterpart():
    own = offer(0, records=20, seed=1, batch=4)
    close = offer(1, 7, records=19, seed=1, batch=4)
    found = counterparts(own, [own, offer(1, 3, records=5, seed=2, batch=4), close], range(3))
    assert found.different == {1: close} and found.absent == (2,)


def test_equal_iterators_are_matched_in_order():
    own, later = offer(0, 4), offer(0, 9)
    found = counterparts(own, [later, own, offer(1, 8), offer(1, 2)], range(2))
    assert found.equal[1].number == 2


def test_differences_name_the_processes():
    values = [
        {"records": 21, "seed": 0, "operators": ["resize\t__Resize_1\tsize=16", "flip\t__Flip_2"]},
        {"records": 21, "seed": 0, "operators": ["resize\t__Resize_1\tsize=16", "flip\t__Flip_2"]},
        {"records": 20, "seed": 0, "operators": ["resize\t__Resize_1\tsize=24"], "more": "x"},
    ]
    assert described({p: offer(p, **one) for p, one in enumerate(values)}) == [
        "records: processes 0, 1 have 21, process 2 has 20",
        "more: processes 0, 1 have none, process 2 has x",
        "operators.resize.size: process 0 has 16, process 2 has 24",
        "operators.flip: process 0 has flip, process 2 has (none)",
    ]


def test_many_differences_are_cut():
    one, other = ({f"value {k}": k * p for k in range(30)} for p in (1, 2))
    lines = described({0: offer(0, **one), 1: offer(1, **other)})
    assert len(lines) == 11 and lines[-1] == "and 19 more"


def test_absent_processes_are_named():
    text = absence_text("train", "the next batch", [1, 2], [Offer(2, 0, {"function": "eval"})], 5)
    assert text.startswith(
        "processes 1, 2 have not reached the next batch of train within 5 s (process 2 waits for "
        "eval). Every process"
    )


def test_offers_survive_json_and_seeds_of_shards_do_not_count():
    one = Offer(3, 5, {"function": "f", "operators": ["a\tb"], "records": 7}, Batches(4, False))
    assert Offer.from_json(3, 5, one.to_json()) == one
    line = "random.uniform\tu\trange=[0,1]"
    assert without_seeds(f"{line}\tseed=5") == line


def test_departed_processes_are_named_with_their_errors():
    text = departure_text("train", "the next batch", {3: "", 1: "ValueError: no file"})
    assert text.startswith("processes 1, 3 did not reach the next batch of train")
    assert "\n  process 1 raised ValueError: no file\n  the program of process 3 ended" in text
