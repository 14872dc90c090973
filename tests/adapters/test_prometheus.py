"""Prometheus: a scrape reads the counters of the iterators."""

import time
import urllib.request

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dalijax import LastBatchPolicy, data_iterator, sources
from dalijax.adapters.prometheus import InputCollector

N, B = 11, 4


def iterator_of(**options):
    source = sources.Arrays({"x": np.arange(N, dtype=np.int32)})
    take = data_iterator(lambda x: x + 0, ["x"], source=source, as_numpy=True)
    return take(batch_size=B, num_threads=1, **options)


def read(text):
    return {
        (sample.name, sample.labels["iterator"], sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "iterator" in sample.labels
    }


def scrape(registry):
    return read(prometheus_client.generate_latest(registry).decode())


def test_a_scrape_reads_the_counters_over_http():
    train, check = iterator_of(seed=1), iterator_of(last_batch_padded=True)
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    registry.register(InputCollector({"train": train, "eval": check}))
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
        assert set(scrape(registry).values()) == {0.0}
        start = time.perf_counter()
        for _ in range(2):
            next(train)
        assert len(list(check)) == 3
        taken = time.perf_counter() - start
        metrics = read(urllib.request.urlopen(url).read().decode())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    for name, batches, examples, padding, step in (("train", 2, 8, 0, 1), ("eval", 3, 11, 1, 2)):
        assert metrics["dalijax_input_batches_total", name, None] == batches
        assert metrics["dalijax_input_examples_total", name, None] == examples
        assert metrics["dalijax_input_padding_total", name, None] == padding
        assert metrics["dalijax_input_errors_total", name, None] == 0
        assert metrics["dalijax_input_epoch", name, None] == 0
        assert metrics["dalijax_input_step", name, None] == step
        assert 0 < metrics["dalijax_input_wait_seconds_total", name, None] < taken


def test_the_histogram_counts_each_call_of_next():
    iterator = iterator_of()
    registry = prometheus_client.CollectorRegistry()
    registry.register(InputCollector({"train": iterator}))
    durations = []
    for _ in range(3):
        start = time.perf_counter_ns()
        next(iterator)
        durations.append(time.perf_counter_ns() - start)
    metrics, name = scrape(registry), "grain_python_dataset_next_duration_ns"
    assert metrics[f"{name}_count", "train", None] == 3
    assert 0 < metrics[f"{name}_sum", "train", None] <= sum(durations)
    bounds = sorted((float(le), v) for (n, _, le), v in metrics.items() if n == f"{name}_bucket")
    assert [v for _, v in bounds] == sorted(v for _, v in bounds)
    assert bounds[-1] == (float("inf"), 3)
    for bound, count in bounds:  # time measured from outside is at least as long
        assert count >= sum(duration < bound for duration in durations)


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("policy", ("FILL", "PARTIAL", "DROP"))
def test_padding_counts_repeated_samples(policy, padded):
    iterator = iterator_of(last_batch_policy=LastBatchPolicy[policy], last_batch_padded=padded)
    stats = iterator.watch()
    rows = np.concatenate([batch["x"] for _ in range(3) for batch in iterator])
    repeats = 3 * (-N % B) if padded and policy == "FILL" else 0
    assert (stats.examples, stats.padding) == (len(rows) - repeats, repeats)
    assert sum(stats.wait_counts) == stats.batches + 3  # the ends are calls, too


def test_the_name_may_be_that_of_grains_exporter():
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    prometheus_client.Histogram(
        "grain_python_dataset_next_duration_ns", "Grain's own", registry=registry
    )
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(InputCollector({"train": iterator_of()}))
    registry.register(InputCollector({"train": iterator_of()}, grain_name=False))
    assert ("dalijax_input_batches_total", "train", None) in scrape(registry)


def test_iterators_without_counters_are_refused():
    with pytest.raises(TypeError, match="must be a dict"):
        InputCollector(iterator_of())
    with pytest.raises(TypeError, match="'train' has no watch"):
        InputCollector({"train": iter([])})
