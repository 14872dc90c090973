"""Which settings make a pipeline fastest here: measured, on the user's own pipeline.

One setting after the other is varied, with the best of those before it: threads, the hardware
decoder's load (where the graph takes it as an argument), the depth of prefetching, the batch.
The candidates of a setting take turns, round by round, so that what disturbs the machine
disturbs all of them; of those that can't be told from the fastest the cheapest is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..arguments import function_parameters
from ..iterator.data_iterator import IteratorFunction, iterator_function
from ..iterator.epoch_stream import BatchStream
from ..pipeline.function_source import DEFAULT_NUM_THREADS

_SMALLEST = 0.03  # shares of the rate below which candidates are alike
_TOO_NOISY = 0.15
_ROUNDS = 3
_LOADS = (0.0, 0.65, 0.8, 0.9, 1.0)
_DALIS_LOAD = 0.65  # the default of its decoders
_DEPTHS = (2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the measurements of one setting say.

    Attributes:
        value: The value to take.
        rate: Its median, in samples per second.
        tolerance: Share of the rate within which candidates can't be told apart.
        clear: False where the machine was too noisy to tell it from the value before.
    """

    value: Any
    rate: float
    tolerance: float
    clear: bool


def choose(rates: Mapping[Any, Sequence[float]], before: Any) -> Choice:
    """The cheapest of the fastest values.

    Args:
        rates: Samples per second of each value, in each round; cheaper values come first.
        before: The value to keep where nothing can be told apart; one of them.
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
    """What `tune` found.

    Attributes:
        name: Name of the iterator function.
        settings: The settings to pass.
        rate: Samples per second with them.
        before: Samples per second with the settings that were there: `rate` over what each choice
            gained in its own rounds, since a machine's speed changes from minute to minute.
        measured: For each setting its values, with samples per second of each round.
        clear: False where the machine was too noisy for one of the settings.
        failures: What went wrong with values that could not be measured.
    """

    name: str
    settings: dict[str, Any]
    rate: float
    before: float
    measured: dict[str, dict[Any, list[float]]]
    clear: bool
    failures: list[str]

    @property
    def line(self) -> str:
        """The line of code to paste."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"iterator = {self.name}(..., {arguments})"

    def table(self) -> str:
        """A table of all that was measured."""
        rows = ["setting | value | samples/s | rounds", "--- | --- | --- | ---"]
        for name, rates in self.measured.items():
            for value, rounds in rates.items():
                taken = "**" if self.settings.get(name) == value else ""
                each = ", ".join(f"{rate:,.0f}" for rate in rounds)
                rows.append(
                    f"{name} | {taken}{value}{taken} | {statistics.median(rounds):,.0f} | {each}"
                )
        return "\n".join(f"| {row} |" for row in rows)

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of samples per second against each setting; it needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.2 * len(self.measured), 3.6))
        axes = figure.subplots(1, len(self.measured), squeeze=False)[0]
        for ax, (name, rates) in zip(axes, self.measured.items()):
            positions = range(len(rates))
            for rounds, position in zip(rates.values(), positions):
                ax.plot([position] * len(rounds), rounds, "o", color="0.7")
            ax.plot(positions, [statistics.median(rounds) for rounds in rates.values()], "o-")
            ax.set_xticks(positions, [str(value) for value in rates])
            highest = max(max(rounds) for rounds in rates.values())
            ax.set(xlabel=name, ylabel="samples/s", ylim=(0, 1.1 * highest))
        figure.tight_layout()
        figure.savefig(path)


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to the number of cores, and that number."""
    counts = [1 << k for k in range(cores.bit_length()) if 1 << k <= cores]
    return counts if counts[-1] == cores else [*counts, cores]


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
    progress: Callable[[int, int, str], None] | None = None,
    **call: Any,
) -> Tuned:
    """Measures an iterator function with other settings, on this machine.

    Args:
        iterator_fn: What `dalijax.data_iterator` returned.
        batch_size: Its batch size; the global one, with sharding.
        seconds: About as long it measures; building the pipelines comes on top.
        max_seconds: After as long it begins nothing new, and says what was not tried; twice
            ``seconds`` by default.
        num_threads: Threads of each pipeline to try: powers of two up to the cores by default.
        hw_decoder_load: Loads of the hardware JPEG decoder to try. By default 0 to 1 where the
            graph function has an argument of this name (to be handed to its decoder).
        prefetch_queue_depth: Depths to try; 2, 3 and 4 by default.
        batch_sizes: Batch sizes to try, too; none by default, since the model decides.
        progress: Called with the number of measurements done and of all, and the next one's name.
        **call: Further arguments of the iterator function. A setting that is among them, or else
            the function's own default, is what the measurements begin with.

    Raises:
        TypeError: If ``iterator_fn`` is none.
        Exception: What the iterator raises with the settings that are tried first.
    """
    iterator_function(iterator_fn)
    cores = len(os.sched_getaffinity(0))
    candidates: dict[str, Sequence[Any]] = {
        "num_threads": thread_counts(cores) if num_threads is None else num_threads
    }
    if "hw_decoder_load" in function_parameters(iterator_fn.pipeline_fn):
        candidates["hw_decoder_load"] = _LOADS if hw_decoder_load is None else hw_decoder_load
    candidates["prefetch_queue_depth"] = (
        _DEPTHS if prefetch_queue_depth is None else prefetch_queue_depth
    )
    if batch_sizes:
        candidates["batch_size"] = batch_sizes
    usual: dict[str, Any] = {
        "num_threads": DEFAULT_NUM_THREADS,
        "hw_decoder_load": _DALIS_LOAD,
        "prefetch_queue_depth": 2,
    }
    settings: dict[str, Any] = {
        name: call.pop(name, _default(iterator_fn.pipeline_fn, name, usual[name]))
        for name in candidates
        if name != "batch_size"
    }
    settings["batch_size"] = batch_size
    for name, values in candidates.items():
        candidates[name] = sorted({*values, settings[name]})
    total = _ROUNDS * sum(len(values) for values in candidates.values())
    each, done = seconds / total, 0
    end = time.perf_counter() + (2 * seconds if max_seconds is None else max_seconds)
    tuned = Tuned(iterator_fn.__name__, settings, 0.0, 0.0, {}, True, [])
    gain = 1.0
    for name, values in candidates.items():
        if time.perf_counter() > end:
            tuned.failures.append(f"{name} was not tried: the time was over, pass more max_seconds")
            tuned.clear = False
            continue
        before, failed = settings[name], set[Any]()
        rates: dict[Any, list[float]] = {value: [] for value in values}
        with contextlib.ExitStack() as opened:  # they are built once: that takes long on a GPU
            streams: dict[Any, BatchStream] = {}
            for number in range(_ROUNDS):
                if number and time.perf_counter() > end:
                    break
                for value in values:
                    if progress is not None:
                        progress(done, total, f"{name}={value}")
                    done += 1
                    if value in failed:
                        continue
                    tried = {**settings, name: value}
                    try:
                        if value not in streams:
                            streams[value] = iterator_fn.stream(None, **call, **tried)
                            opened.callback(streams[value].close)
                        rates[value].append(_rate(streams[value], tried, each))
                    except Exception as error:
                        if value == before:
                            raise
                        failed.add(value)
                        tuned.failures.append(f"{name}={value}: {error}")
        known = {value: rounds for value, rounds in rates.items() if value not in failed}
        choice = choose(known, before)
        tuned.measured[name] = known
        gain *= choice.rate / statistics.median(known[before])
        tuned.clear &= choice.clear
        settings[name], tuned.rate = choice.value, choice.rate
    tuned.before = tuned.rate / gain
    if progress is not None:
        progress(total, total, "done")
    return tuned


def _default(function: Callable[..., Any], name: str, otherwise: Any) -> Any:
    """The default of a function's argument, where it has one that says something."""
    parameter = inspect.signature(function).parameters.get(name)
    default = None if parameter is None else parameter.default
    return otherwise if default in (None, inspect.Parameter.empty) else default


def _rate(stream: BatchStream, settings: Mapping[str, Any], seconds: float) -> float:
    """Samples per second of a stream, once what it had prefetched is used up."""
    for _ in range(max(3, settings["prefetch_queue_depth"] + 1)):
        next(stream)
    begin = now = time.perf_counter()
    count = 0
    while now - begin < seconds or count < 3:
        next(stream)
        count += 1
        now = time.perf_counter()
    return float(count * settings["batch_size"] / (now - begin))
