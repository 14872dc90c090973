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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..arguments import function_parameters
from ..iterator.data_iterator import IteratorFunction, iterator_function
from ..iterator.epoch_stream import BatchStream
from ..pipeline.pipeline_source import DEFAULT_NUM_THREADS
from .memory import Memory

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
        before: Samples per second with the settings in `began`: `rate` over what each choice
            gained in its own rounds, since a machine's speed changes from minute to minute.
        measured: For each setting its values, with samples per second of each round.
        memory: For each setting its values, with the memory that their pipelines take, about:
            with a full queue of prefetched batches.
        kept: Settings that stay as they were, since the machine was too noisy to choose, or the
            time was over.
        failures: What went wrong with values that could not be measured.
        began: The settings that the measurements began with: those of the call, or the defaults.
    """

    name: str
    settings: dict[str, Any]
    rate: float = 0.0
    before: float = 0.0
    measured: dict[str, dict[Any, list[float]]] = dataclasses.field(default_factory=dict)
    memory: dict[str, dict[Any, Memory]] = dataclasses.field(default_factory=dict)
    kept: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    began: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def clear(self) -> bool:
        """Whether every setting was chosen by what was measured."""
        return not self.kept

    @property
    def line(self) -> str:
        """The line of code to paste."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"iterator = {self.name}(..., {arguments})"

    @property
    def summary(self) -> str:
        """What the recommended settings give, in a sentence."""
        if not self.measured:
            return "Nothing was measured: pass more max_seconds."
        rate, percent = f"{self.rate:,.0f} samples/s", 100 * (self.rate / self.before - 1)
        tried = (name for name in self.measured if self.began[name] != self.settings[name])
        began = ", ".join(f"{name}={self.began[name]}" for name in tried)
        if not began:
            return f"{rate}, with the settings that were there."
        if abs(percent) < 100 * _SMALLEST:
            return f"{rate}, as fast as with {began}."
        more = "more" if percent > 0 else "less"
        return f"{rate}, {abs(percent):.0f} % {more} than the {self.before:,.0f} with {began}."

    def table(self) -> str:
        """A table of all that was measured; values that were chosen are bold."""
        rows = ["setting | value | samples/s | memory | rounds", "--- | --- | --- | --- | ---"]
        for name, rates in self.measured.items():
            for value, rounds in rates.items():
                shown = str(value)
                if self.settings[name] == value:
                    shown = f"{value} (kept)" if name in self.kept else f"**{value}**"
                each = ", ".join(f"{rate:,.0f}" for rate in rounds)
                memory = self.memory[name][value]
                rows.append(
                    f"{name} | {shown} | {statistics.median(rounds):,.0f} | {memory} | {each}"
                )
        return "\n".join(f"| {row} |" for row in rows)

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of samples per second against each setting.

        Raises:
            ImportError: If there is no matplotlib.
        """
        figure = _figure_class()(figsize=(4.2 * max(1, len(self.measured)), 4.2))
        figure.suptitle(f"{self.name}: {self.summary}", fontsize=10)
        axes = figure.subplots(1, max(1, len(self.measured)), squeeze=False)[0]
        for ax, (name, rates) in zip(axes, self.measured.items()):
            medians = [statistics.median(rounds) for rounds in rates.values()]
            for position, rounds in enumerate(rates.values()):
                label = None if position else "each round"
                ax.plot([position] * len(rounds), rounds, "o", color="0.7", label=label)
            ax.plot(range(len(rates)), medians, "o-", label="median")
            taken = list(rates).index(self.settings[name])
            what = f"{'kept' if name in self.kept else 'chosen'}: {self.settings[name]}"
            ax.plot(taken, medians[taken], "*", markersize=16, color="tab:red", label=what)
            ax.set_xticks(range(len(rates)), [str(value) for value in rates])
            highest = max(max(rounds) for rounds in rates.values())
            ax.set(xlabel=name, ylabel="samples/s", ylim=(0, 1.1 * highest))
            ax.legend(loc="lower right")
        figure.tight_layout()
        figure.savefig(path)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install matplotlib") from error
    return Figure


def check_plot() -> None:
    """Raises ImportError where `Tuned.save_plot` would, before anything is measured."""
    _figure_class()


def progress_bar(done: int, total: int, what: str) -> None:
    """Writes a bar to the standard error, with what is measured next."""
    width = 30
    bar = "#" * (width * done // total)
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r[{bar:<{width}}] {done}/{total} {what:<32}{end}")
    sys.stderr.flush()


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
    progress: Callable[[int, int, str], None] | None = progress_bar,
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
        progress: Called with the number of measurements done and of all, and the next one's name;
            a bar by default, None for nothing.
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
    # What loads libraries and starts CUDA is no value's memory.
    with contextlib.closing(iterator_fn.stream(None, **call, **settings)) as stream:
        next(stream)
    total = _ROUNDS * sum(len(values) for values in candidates.values())
    each, done = seconds / total, 0
    end = time.perf_counter() + (2 * seconds if max_seconds is None else max_seconds)
    tuned = Tuned(iterator_fn.__name__, settings, began=dict(settings))
    gain = 1.0
    for name, values in candidates.items():
        if time.perf_counter() > end:
            tuned.failures.append(f"{name} was not tried: the time was over, pass more max_seconds")
            tuned.kept.append(name)
            continue
        before, failed = settings[name], set[Any]()
        rates: dict[Any, list[float]] = {value: [] for value in values}
        memory: dict[Any, Memory] = {}
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
                            free = Memory.unused()
                            streams[value] = iterator_fn.stream(None, **call, **tried)
                            opened.callback(streams[value].close)
                            memory[value] = _memory(streams[value], tried, free)
                        rates[value].append(_rate(streams[value], tried, each))
                    except Exception as error:
                        if value == before:
                            raise
                        failed.add(value)
                        tuned.failures.append(f"{name}={value}: {error}")
        known = {value: rounds for value, rounds in rates.items() if value not in failed}
        choice = choose(known, before)
        tuned.measured[name], tuned.memory[name] = known, memory
        gain *= choice.rate / statistics.median(known[before])
        tuned.kept += [] if choice.clear else [name]
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


def _memory(stream: BatchStream, settings: Mapping[str, Any], free: Memory) -> Memory:
    """The memory of a stream whose queue is full: as many batches are held as it is deep."""
    held = [next(stream) for _ in range(settings["prefetch_queue_depth"])]
    memory = Memory.now().since(free)
    del held
    return memory


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
