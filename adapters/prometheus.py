"""`InputCollector`: counters of an input pipeline as Prometheus metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from ..core.environment.extras import extra
from ..core.stats import Watched

with extra("prometheus", "dalijax.adapters.prometheus"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector

__all__ = ["InputCollector"]


def __dir__() -> list[str]:
    return sorted(__all__)


_NEXT = "grain_python_dataset_next_duration_ns"  # Grain's /grain/python/dataset/next_duration_ns
_POWERS = 42  # number of buckets: as in Grain, the powers of two ns below an hour
_FIELDS = {  # metric and description of fields of InputStats
    "batches": (CounterMetricFamily, "Delivered batches, including failed batches."),
    "examples": (CounterMetricFamily, "Delivered samples, without padding."),
    "padding": (CounterMetricFamily, "Repeated samples that fill a last batch."),
    "errors": (CounterMetricFamily, "Failed batches in the whole run."),
    "wait_seconds": (CounterMetricFamily, "Seconds spent in next()."),
    "epoch": (GaugeMetricFamily, "Epoch of the last batch."),
    "step": (GaugeMetricFamily, "Index of the last batch in its epoch."),
}


class InputCollector(Collector):
    """A `prometheus_client` collector that reads the counters of iterators at each scrape.

    No thread runs between scrapes, and the only cost is that of ``iterator.watch()``. The metrics
    describe this process, and have a label ``iterator``:

    - ``grain_python_dataset_next_duration_ns``: a histogram of the durations of ``next()`` in
      nanoseconds, with the name and unit of Grain's own metric.
    - ``dalijax_input_batches_total``, ``..._examples_total``, ``..._padding_total``,
      ``..._errors_total``, ``..._wait_seconds_total``, and the gauges ``dalijax_input_epoch`` and
      ``dalijax_input_step``: see `dalijax.InputStats`.

    Args:
        iterators: The iterators, by the value of their label: ``{"train": iterator}``. Counting
            starts when the collector is created, unless ``watch()`` was called before.
        grain_name: Whether to export the histogram. Pass False if Grain's own exporter
            (``ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY``) uses the same registry.

    Raises:
        TypeError: If ``iterators`` is not a dict of iterators with a ``watch()`` method.
    """

    def __init__(self, iterators: Mapping[str, Watched], *, grain_name: bool = True):
        if not isinstance(iterators, Mapping):
            raise TypeError(
                f'iterators must be a dict such as {{"train": iterator}}, not {iterators!r}'
            )
        for name, iterator in iterators.items():
            if not callable(getattr(iterator, "watch", None)):
                raise TypeError(
                    f"{name!r} has no watch() method, which returns counters: {iterator!r}. Pass "
                    "an iterator of dalijax"
                )
        self._stats = {name: iterator.watch() for name, iterator in iterators.items()}
        self._grain_name = grain_name

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics with the current counters, for a scrape."""
        for field, (family, text) in _FIELDS.items():
            metric = family(f"dalijax_input_{field}", text, labels=["iterator"])
            for name, stats in self._stats.items():
                metric.add_metric([name], getattr(stats, field))
            yield metric
        if self._grain_name:
            yield self._durations()

    def _durations(self) -> Metric:
        histogram = HistogramMetricFamily(
            _NEXT, "Duration of each call of next() in nanoseconds.", labels=["iterator"]
        )
        for name, stats in self._stats.items():
            totals = list(itertools.accumulate(stats.wait_counts))
            buckets = [(str(float(1 << power)), totals[power]) for power in range(_POWERS)]
            buckets.append(("+Inf", totals[-1]))
            histogram.add_metric([name], buckets, sum_value=1e9 * stats.wait_seconds)
        return histogram
