"""Searches for the fastest settings of a pipeline, by measuring the user's pipeline.

One setting after the other is varied: threads, the load of the hardware decoder (if the graph takes
it as an argument), the prefetch depth, the batch size. The settings before it have their best
values. The values of a setting are measured in alternating rounds, so that other load on the
machine affects all values. Among values that can't be distinguished from the fastest, the cheapest
is chosen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...api import IteratorFunction, iterator_function
from ...arguments import function_parameters, knows_its_names
from ...iterator.batch_stream import BatchStream
from ...pipeline.pipeline_factory import DEFAULT_NUM_THREADS
from .memory import Memory

_SMALLEST = 0.03  # relative difference of rates below which values count as equal
_TOO_NOISY = 0.15
_ROUNDS = 3
_LOADS = (0.0, 0.65, 0.8, 0.9, 1.0)
_DEPTHS = (2, 3, 4)
# Defaults of data_iterator and, for the load, of DALI's decoders.
_DEFAULTS = {
    "num_threads": DEFAULT_NUM_THREADS,
    "hw_decoder_load": 0.65,
    "prefetch_queue_depth": 2,
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen value of a setting.

    Attributes:
        value: The value.
        rate: Median rate of this value, in samples per second.
        tolerance: Relative difference of rates below which values can't be distinguished.
        clear: False if the machine was too noisy to compare values, so that the previous value is
            kept.
    """

    value: Any
    rate: float
    tolerance: float
    clear: bool


def choose(rates: Mapping[Any, Sequence[float]], before: Any) -> Choice:
    """Returns the cheapest value that is not measurably slower than the fastest, as a `Choice`.

    Args:
        rates: Samples per second of each value, in each round; cheaper values come first.
        before: The current value, which is kept if the rates are too noisy to compare.
    """
    medians = {value: statistics.median(rounds) for value, rounds in rates.items()}
    spreads = [(max(rounds) - min(rounds)) / medians[value] for value, rounds in rates.items()]
    tolerance = max(_SMALLEST, statistics.median(spreads))
    best = max(medians.values())
    alike = [value for value, rate in medians.items() if rate >= best * (1 - tolerance)]
    clear = tolerance <= _TOO_NOISY or before not in alike
    value = alike[0] if clear else before
    return Choice(value, medians[value], tolerance, clear)


@dataclasses.dataclass
class Tuned:
    """The result of `tune`.

    Attributes:
        name: Name of the iterator function.
        settings: The chosen settings.
        rate: Samples per second with the chosen settings.
        before: Samples per second with the settings in `began`: `rate` divided by the gain of each
            choice in its own rounds, because a machine's speed varies over minutes.
        measured: For each setting and value, samples per second in each round.
        memory: For each setting and value, the approximate memory of its pipelines with a full
            prefetch queue.
        unchanged: Settings that keep their initial values, because the machine was too noisy, the
            time was over, or Ctrl-C was pressed.
        failures: Messages about values and settings that could not be measured.
        began: The initial settings: from the call, or the defaults.
        interrupted: Whether Ctrl-C ended the measurements early.
    """

    name: str
    settings: dict[str, Any]
    rate: float = 0.0
    before: float = 0.0
    measured: dict[str, dict[Any, list[float]]] = dataclasses.field(default_factory=dict)
    memory: dict[str, dict[Any, Memory]] = dataclasses.field(default_factory=dict)
    unchanged: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    began: dict[str, Any] = dataclasses.field(default_factory=dict)
    interrupted: bool = False

    @property
    def clear(self) -> bool:
        """Returns whether the measurements decided every setting; False if some are `unchanged`."""
        return not self.unchanged

    @property
    def line(self) -> str:
        """Returns a line of code with the chosen settings, to paste into a program."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"iterator = {self.name}(..., {arguments})"

    @property
    def summary(self) -> str:
        """Returns a sentence about the speed with the chosen settings."""
        if not self.measured:
            return "Nothing was measured: pass more max_seconds."
        rate, percent = f"{self.rate:,.0f} samples/s", 100 * (self.rate / self.before - 1)
        tried = (name for name in self.measured if self.began[name] != self.settings[name])
        began = ", ".join(f"{name}={self.began[name]}" for name in tried)
        if not began:
            return f"{rate}, with the initial settings."
        if abs(percent) < 100 * _SMALLEST:
            return f"{rate}, as fast as with {began}."
        comparison = "more" if percent > 0 else "less"
        return (
            f"{rate}, {abs(percent):.0f} % {comparison} than the {self.before:,.0f} with {began}."
        )

    def table(self) -> str:
        """Returns a Markdown table of all measurements; chosen values are bold."""
        rows = ["setting | value | samples/s | memory | rounds", "--- | --- | --- | --- | ---"]
        for name, rates in self.measured.items():
            for value, rounds in rates.items():
                shown = str(value)
                if self.settings[name] == value:
                    shown = f"{value} (kept)" if name in self.unchanged else f"**{value}**"
                round_rates = ", ".join(f"{rate:,.0f}" for rate in rounds)
                memory = self.memory[name][value]
                rows.append(
                    f"{name} | {shown} | {statistics.median(rounds):,.0f} | {memory} | "
                    f"{round_rates}"
                )
        return "\n".join(f"| {row} |" for row in rows)

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Plots samples per second against each setting, and saves the plot.

        Args:
            path: The file to write; its suffix determines the format, e.g. ".png".

        Raises:
            ImportError: If matplotlib is not installed.
        """
        figure = figure_class()(figsize=(4.2 * max(1, len(self.measured)), 4.2))
        figure.suptitle(f"{self.name}: {self.summary}", fontsize=10)
        axes = figure.subplots(1, max(1, len(self.measured)), squeeze=False)[0]
        for ax, (name, rates) in zip(axes, self.measured.items()):
            medians = [statistics.median(rounds) for rounds in rates.values()]
            for position, rounds in enumerate(rates.values()):
                label = None if position else "each round"
                ax.plot([position] * len(rounds), rounds, "o", color="0.7", label=label)
            ax.plot(range(len(rates)), medians, "o-", label="median")
            chosen = list(rates).index(self.settings[name])
            label = f"{'kept' if name in self.unchanged else 'chosen'}: {self.settings[name]}"
            ax.plot(chosen, medians[chosen], "*", markersize=16, color="tab:red", label=label)
            ax.set_xticks(range(len(rates)), [str(value) for value in rates])
            highest = max(max(rounds) for rounds in rates.values())
            ax.set(xlabel=name, ylabel="samples/s", ylim=(0, 1.1 * highest))
            ax.legend(loc="lower right")
        figure.tight_layout()
        figure.savefig(path)


def figure_class() -> Any:
    """Returns matplotlib's class of figures.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install matplotlib") from error
    return Figure


def progress_bar(finished: int, total: int, label: str) -> None:
    """Writes a progress bar to the standard error, with the name of the next measurement."""
    width = 30
    bar = "#" * (width * finished // total)
    end = "\n" if finished == total else ""
    sys.stderr.write(f"\r[{bar:<{width}}] {finished}/{total} {label:<32}{end}")
    sys.stderr.flush()


def thread_counts(cores: int) -> list[int]:
    """Returns the powers of two up to the number of cores, and the number of cores."""
    counts = [1 << k for k in range(cores.bit_length()) if 1 << k <= cores]
    return counts if counts[-1] == cores else [*counts, cores]


@knows_its_names
def tune(
    iterator_fn: IteratorFunction,
    *,
    batch_size: int,
    seconds: float = 60.0,
    max_seconds: float | None = None,
    num_threads: Sequence[int] | None = None,
    hw_decoder_load: Sequence[float] | None = None,
    prefetch_queue_depth: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (),
    progress: Callable[[int, int, str], None] | None = progress_bar,
    **call: Any,
) -> Tuned:
    """Returns the fastest settings of an iterator function on this machine, by measuring them.

    Args:
        iterator_fn: An iterator function, from `dalijax.data_iterator`.
        batch_size: Initial batch size; with sharding the global batch size.
        seconds: Approximate total time of the measurements, in addition to building pipelines.
        max_seconds: Time after which no measurement starts; the result lists settings that were not
            tried. None: twice ``seconds``.
        num_threads: Numbers of threads of each pipeline to try; None: powers of two up to the
            number of cores.
        hw_decoder_load: Loads of the hardware JPEG decoder to try; None: 0, 0.65, 0.8, 0.9 and 1.
            They are tried only if the graph function has an argument ``hw_decoder_load``, which it
            passes to its decoder.
        prefetch_queue_depth: Depths of the prefetch queue to try; None: 2, 3 and 4.
        batch_sizes: Batch sizes to try in addition to ``batch_size``. The default is empty, because
            the batch size usually depends on the model.
        progress: Called with the number of finished measurements, the total number, and the name of
            the next measurement; by default a bar on the standard error. None: no progress.
        **call: Further arguments of the iterator function. They may include initial settings.

    Raises:
        TypeError: If ``iterator_fn`` is not an iterator function.
        Exception: Any error of the iterator with the initial settings.
        KeyboardInterrupt: If Ctrl-C is pressed before the first measurement. Later, Ctrl-C ends the
            measurements, and the result contains the completed ones.
    """
    iterator_function(iterator_fn)
    if num_threads is None:
        num_threads = thread_counts(len(os.sched_getaffinity(0)))
    candidates: dict[str, Sequence[Any]] = {"num_threads": num_threads}
    if "hw_decoder_load" in function_parameters(iterator_fn.pipeline_fn):
        candidates["hw_decoder_load"] = _LOADS if hw_decoder_load is None else hw_decoder_load
    depths = _DEPTHS if prefetch_queue_depth is None else prefetch_queue_depth
    candidates["prefetch_queue_depth"] = depths
    settings = {
        name: call.pop(name, _default(iterator_fn.pipeline_fn, name, _DEFAULTS[name]))
        for name in candidates
    }
    settings["batch_size"] = batch_size
    if batch_sizes:
        candidates["batch_size"] = batch_sizes
    for name, values in candidates.items():
        candidates[name] = sorted({*values, settings[name]})
    open_stream = functools.partial(iterator_fn.stream, None, **call)
    # Loads libraries and initializes CUDA, whose memory should not count for the first value.
    with contextlib.closing(open_stream(**settings)) as stream:
        next(stream)
    total = _ROUNDS * sum(len(values) for values in candidates.values())
    end = time.perf_counter() + (2 * seconds if max_seconds is None else max_seconds)
    tuned = Tuned(iterator_fn.__name__, settings, began=dict(settings))
    gain, finished = 1.0, 0

    def show_next(label: str) -> None:
        nonlocal finished
        if progress is not None:
            progress(finished, total, label)
        finished += 1

    for name, values in candidates.items():
        if tuned.interrupted:
            tuned.failures.append(f"{name} was not tried: interrupted")
            tuned.unchanged.append(name)
            continue
        if time.perf_counter() > end:
            tuned.failures.append(f"{name} was not tried: the time was over, pass more max_seconds")
            tuned.unchanged.append(name)
            continue
        measured = _measure(name, values, settings, open_stream, seconds / total, end, show_next)
        before = settings[name]
        tuned.failures += measured.failures
        if measured.interrupted:
            tuned.interrupted = True
            tuned.unchanged.append(name)
            if before not in measured.rates:  # there is no reference to compare with
                tuned.failures.append(f"{name} was not tried: interrupted")
                continue
            tuned.failures.append(f"{name} was interrupted")
        tuned.measured[name], tuned.memory[name] = measured.rates, measured.memory
        if measured.interrupted:
            tuned.rate = statistics.median(measured.rates[before])
            continue
        choice = choose(measured.rates, before)
        gain *= choice.rate / statistics.median(measured.rates[before])
        if not choice.clear:
            tuned.unchanged.append(name)
        settings[name], tuned.rate = choice.value, choice.rate
    if tuned.interrupted and not tuned.measured:
        raise KeyboardInterrupt
    tuned.before = tuned.rate / gain
    if progress is not None and not tuned.interrupted:
        progress(total, total, "done")
    return tuned


class _Measured(NamedTuple):
    """Measurements of one setting.

    Attributes:
        rates: Samples per second in each round, by value.
        memory: Memory of the pipelines, by value.
        failures: Messages about values that could not be measured.
        interrupted: Whether Ctrl-C ended the measurements early.
    """

    rates: dict[Any, list[float]]
    memory: dict[Any, Memory]
    failures: list[str]
    interrupted: bool


def _measure(
    name: str,
    values: Sequence[Any],
    settings: Mapping[str, Any],
    open_stream: Callable[..., BatchStream],
    seconds: float,
    end: float,
    show_next: Callable[[str], None],
) -> _Measured:
    """Measures the values of one setting in alternating rounds.

    Args:
        name: The name of the setting.
        values: The values of this setting to measure.
        settings: The current values of all settings; an error with these values is raised.
        open_stream: Opens a stream with the given settings.
        seconds: Duration of each measurement.
        end: The time.perf_counter() after which no further round starts.
        show_next: Called before each measurement with the name of the measurement.
    """
    rates: dict[Any, list[float]] = {value: [] for value in values}
    memory: dict[Any, Memory] = {}
    failures: dict[Any, str] = {}
    streams: dict[Any, BatchStream] = {}  # built once, because building is slow on a GPU
    interrupted = False
    with contextlib.ExitStack() as opened:
        try:
            for number in range(_ROUNDS):
                if number and time.perf_counter() > end:
                    break
                for value in values:
                    show_next(f"{name}={value}")
                    if value in failures:
                        continue
                    tried = {**settings, name: value}
                    try:
                        if value not in streams:
                            free = Memory.after_release()
                            streams[value] = open_stream(**tried)
                            opened.callback(streams[value].close)
                            memory[value] = _memory(streams[value], tried, free)
                        rates[value].append(_rate(streams[value], tried, seconds))
                    except Exception as error:
                        if value == settings[name]:
                            raise
                        failures[value] = f"{name}={value}: {error}"
        except KeyboardInterrupt:  # keeps the measurements made so far
            interrupted = True
    complete = {v: rounds for v, rounds in rates.items() if rounds and v not in failures}
    return _Measured(complete, memory, list(failures.values()), interrupted)


def _default(function: Callable[..., Any], name: str, otherwise: Any) -> Any:
    """Returns the default of a function's argument, or ``otherwise`` if it is None or missing."""
    parameter = inspect.signature(function).parameters.get(name)
    default = None if parameter is None else parameter.default
    return otherwise if default in (None, inspect.Parameter.empty) else default


def _memory(stream: BatchStream, settings: Mapping[str, Any], free: Memory) -> Memory:
    """Returns the additional memory of a stream with a full prefetch queue.

    The memory is measured while as many batches as the depth of the queue are kept.

    Args:
        stream: The stream.
        settings: The settings of the stream.
        free: The memory that was in use before the stream was opened.
    """
    queued = [next(stream) for _ in range(settings["prefetch_queue_depth"])]
    memory = Memory.measure().since(free)
    del queued
    return memory


def _rate(stream: BatchStream, settings: Mapping[str, Any], seconds: float) -> float:
    """Returns the measured samples per second of a stream, not counting prefetched batches."""
    for _ in range(max(3, settings["prefetch_queue_depth"] + 1)):
        next(stream)
    start = now = time.perf_counter()
    count = 0
    while now - start < seconds or count < 3:
        next(stream)
        count += 1
        now = time.perf_counter()
    return float(count * settings["batch_size"] / (now - start))
