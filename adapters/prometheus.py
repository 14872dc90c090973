"""`InputCollector`: the counters of an input pipeline, as metrics for Prometheus."""

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
_POWERS = 42  # of two: Grain's buckets end at an hour, 2**42 ns
_FIELDS = {  # of InputStats
    "batches": (CounterMetricFamily, "Batches that were delivered, failed ones included."),
    "examples": (CounterMetricFamily, "Samples that were delivered, padding not counted."),
    "padding": (CounterMetricFamily, "Samples that repeat another, to fill a last batch."),
    "errors": (CounterMetricFamily, "Batches that failed in the whole run."),
    "wait_seconds": (CounterMetricFamily, "Seconds that next() took."),
    "epoch": (GaugeMetricFamily, "Epoch of the last batch."),
    "step": (GaugeMetricFamily, "Number of the last batch in its epoch."),
}


class InputCollector(Collector):
    """A collector of `prometheus_client` that reads iterators' counters when it is scraped.

    Between scrapes no thread runs, and the only cost is that of ``iterator.watch()``. The metrics
    are of this process, and have a label ``iterator``:

    - ``grain_python_dataset_next_duration_ns``: a histogram of the nanoseconds that calls of
      ``next()`` took, with the name and the unit of Grain's own metric.
    - ``dalijax_input_batches_total``, ``..._examples_total``, ``..._padding_total``,
      ``..._errors_total``, ``..._wait_seconds_total``, and the gauges ``dalijax_input_epoch`` and
      ``dalijax_input_step``: see `dalijax.InputStats`.

    Args:
        iterators: The iterators by the value of the label, as ``{"train": iterator}``. Their
            ``watch()`` is called here, and counts from now on.
        grain_name: False leaves the histogram out, for use with Grain's own exporter
            (``ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY``) in the same registry.

    Raises:
        TypeError: If one of them has no ``watch()``.
    """

    def __init__(self, iterators: Mapping[str, Watched], *, grain_name: bool = True):
        if not isinstance(iterators, Mapping):
            raise TypeError(
                f'iterators must be a dict, as {{"train": iterator}}, not {iterators!r}'
            )
        for name, iterator in iterators.items():
            if not callable(getattr(iterator, "watch", None)):
                raise TypeError(f"{name!r} has no watch(), which gives the counters: {iterator!r}")
        self._stats = {name: iterator.watch() for name, iterator in iterators.items()}
        self._grain_name = grain_name

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        for field, (family, text) in _FIELDS.items():
            metric = family(f"dalijax_input_{field}", text, labels=["iterator"])
            for name, stats in self._stats.items():
                metric.add_metric([name], getattr(stats, field))
            yield metric
        if self._grain_name:
            yield self._durations()

    def _durations(self) -> Metric:
        histogram = HistogramMetricFamily(
            _NEXT, "Nanoseconds that each call of next() took.", labels=["iterator"]
        )
        for name, stats in self._stats.items():
            totals = list(itertools.accumulate(stats.wait_counts))
            buckets = [(str(float(1 << power)), totals[power]) for power in range(_POWERS)]
            buckets.append(("+Inf", totals[-1]))
            histogram.add_metric([name], buckets, sum_value=1e9 * stats.wait_seconds)
        return histogram
