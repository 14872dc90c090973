"""Compares how data loaders resume a run that was killed.

Each loader reads 1,000 numbered records and adds a random number to each, as its documentation
recommends; see ``benchmarks/loaders``. A run is killed by SIGKILL, and a new process resumes it
from a state that was saved before. Its batches are compared with those of an uninterrupted run of
the same loader::

    python benchmarks/resume.py                                   # all loaders, all cases
    python benchmarks/resume.py --loader grain_map --case 2to1    # prints the differences

Loaders that need PyTorch run in virtual environments, ``.venv-resume-NAME``, which the program
creates.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
import venv
from collections.abc import Mapping, Sequence
from typing import Any

import report
from loaders import judge

HERE = pathlib.Path(__file__).resolve().parent
LOADERS = {  # name of the module, and its environment
    "dalijax_source": "project",
    "dalijax_reader": "project",
    "dali_plugin": "project",
    "grain_map": "project",
    "grain_map_batch": "project",
    "grain_loader": "project",
    "grain_elastic": "project",
    "tfdata_checkpoint": "project",
    "tfdata_skip": "project",
    "mosaic_streaming": "streaming",
    "webdataset_resampled": "torch",
    "torchdata_loader": "torch",
    "huggingface": "project",
    "huggingface_torch": "torch",
    "lancedb_streaming": "torch",
    "litdata_streaming": "torch",
    "megatron_energon": "torch",
    "levanter": "levanter",
}
ENVIRONMENTS = {  # the packages of each environment
    "torch": (
        "torch",
        "torchdata",
        "webdataset",
        "datasets",
        "lancedb",
        "litdata",
        "megatron-energon",
    ),
    "levanter": ("marin-levanter==0.2.227.dev40316220070",),  # has no final release
    "streaming": ("torch", "mosaicml-streaming"),  # needs older versions of transformers
    "timm": ("torch", "torchvision", "timm"),
}
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # without CUDA, if it can be reached
SHARDS = 10  # files of the loaders that store several records in a file
EPOCHS = 2
BATCH = 40
EVALUATION: dict[str, Any] = {"batch": 48, "processes": 3, "shuffle": "none", "evaluation": True}
TIMEOUT = 300  # seconds for the processes of a run
YES, NO, REFUSED, NOT_OFFERED = "yes", "no", "refused", "not offered"


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to resume a run.

    Attributes:
        title: Heading of the column.
        table: Number of the table.
        saved: Moment of the saved state: "middle" and "end" of the first epoch, or "after" its
            loop has ended.
        before: Number of processes of the killed run.
        after: Number of processes that resume it.
        changes: Changes of the configuration.
        data: Data of the resumed run: "same", an additional "file", or another "order".
        twice: Whether the resumed run is killed and resumed, too.
        shuffle: Shuffle of all runs.
        notices: Whether the case has changed data or settings that a loader can detect.
    """

    title: str
    table: int = 0
    saved: str = "middle"
    before: int = 1
    after: int = 1
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: str = "same"
    twice: bool = False
    shuffle: str = "full"
    notices: bool = False


CASES = {
    "middle": Case("middle of an epoch"),
    "twice": Case("resumed twice", twice=True),
    "end": Case("after the last batch of an epoch", saved="end"),
    "after": Case("after the loop over an epoch", saved="after"),
    "prefetch": Case("other prefetch depth", changes={"prefetch": 4}),
    "buffer": Case("shuffle buffer or window", shuffle="buffer"),
    "2to2": Case("2, then 2 processes", 1, before=2, after=2),
    "2to1": Case("2, then 1", 1, before=2),
    "2to4": Case("2, then 4", 1, before=2, after=4),
    "batch": Case("batch of 20 instead of 40", 1, changes={"batch": BATCH // 2}),
    "file": Case("an additional file", 2, data="file", notices=True),
    "order": Case("records in another order", 2, data="order", notices=True),
    "seed": Case("another seed", 2, changes={"seed": 2}, notices=True),
    "transform": Case("another transform", 2, changes={"scale": 2.0}, notices=True),
    "evaluation": Case("evaluation", 3),
}


@dataclasses.dataclass
class Run:
    """Events of the processes of a run."""

    batches: list[list[judge.Batch]]
    seconds: list[float]
    saved: dict[str, list[str]]
    sizes: dict[str, int]
    warnings: list[str]
    errors: list[str]
    ended: bool

    @property
    def merged(self) -> list[judge.Batch]:
        """The global batches."""
        return judge.merge(self.batches)


@dataclasses.dataclass(frozen=True)
class Result:
    """The answer for a loader and a case, with its figures."""

    answer: str
    details: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@functools.lru_cache(None)
def python_of(environment: str) -> str:
    """Returns the Python of an environment, and creates the environment if it is missing."""
    if environment == "project":
        return sys.executable
    folder = HERE.parent / f".venv-resume-{environment}"
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps(ENVIRONMENTS[environment])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"creating {folder.name} ...", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        index = []
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{TORCH_INDEX}/", timeout=5).close()
            index = ["--extra-index-url", TORCH_INDEX]
        command = [str(python), "-m", "pip", "install", "-q", *index, *ENVIRONMENTS[environment]]
        subprocess.run(command, check=True)
        stamp.write_text(wanted)
    return str(python)


class Worker:
    """A process of a loader, forked by a `Launcher`.

    Attributes:
        events: Lines of JSON.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.events = path.open()
        self._pid = json.loads(self.events.readline())["pid"]

    def kill(self) -> None:
        """Kills the process and its children by SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


class Launcher:
    """Starts processes of a loader.

    A server imports the loader once and uses nothing of it. Each process is a fork of the server,
    since imports would take most of the time.
    """

    def __init__(self, loader: str, folder: pathlib.Path) -> None:
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "HF_DATASETS_OFFLINE": "1",
        }
        self._folder, self._count = folder, 0
        with (folder / "stderr.txt").open("a") as stderr:
            self._server = subprocess.Popen(
                [python_of(LOADERS[loader]), "-m", "loaders.worker", loader],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self._server.stdout
        ready = self._server.stdout.readline()
        if not ready:
            raise RuntimeError(f"{loader} can't be imported; see {folder}/stderr.txt")
        self.facts = json.loads(ready)

    def start(self, job: Mapping[str, Any]) -> Worker:
        """Starts a process with a job."""
        self._count += 1
        path = self._folder / f"events{self._count}"
        os.mkfifo(path)
        assert self._server.stdin
        self._server.stdin.write(json.dumps({**job, "events": str(path)}) + "\n")
        self._server.stdin.flush()
        return Worker(path)

    def close(self) -> None:
        """Ends the server."""
        self._server.kill()
        self._server.communicate()


class Session:
    """The runs of a loader, in a folder."""

    def __init__(self, loader: str, folder: pathlib.Path, records: int) -> None:
        self.loader, self.records = loader, records
        self._folder, self._runs = folder, 0
        self._launcher = Launcher(loader, folder)
        self.facts = self._launcher.facts
        self._kind = ""  # of the data in the folder
        self._memo: dict[Any, Run] = {}

    def data(self, kind: str) -> str:
        """Returns the folder of a data set, and writes it if necessary.

        All data sets have the same path, as if their files had been replaced. It is no link, since
        loaders may resolve and save it.
        """
        folder = self._folder / "data"
        if kind == self._kind:
            return str(folder)
        if self._kind:
            folder.rename(self._folder / f"data-{self._kind}")
        self._kind = kind
        if (written := self._folder / f"data-{kind}").exists():
            written.rename(folder)
            return str(folder)
        folder.mkdir()
        size = self.records // SHARDS
        shards = [list(range(k * size, (k + 1) * size)) for k in range(SHARDS)]
        if kind == "file":
            shards.append(list(range(self.records, self.records + self.records // 5)))
        elif kind == "order":
            shards = [shard[::-1] for shard in shards[::-1]]
        worker = self._launcher.start({"shards": shards, "folder": str(folder)})
        with worker.events as events:
            errors = [line for line in events if "error" in line]
        if errors:
            raise RuntimeError(f"{self.loader}: {errors}")
        return str(folder)

    def run(
        self,
        processes: int = 1,
        states: Sequence[str] = (),
        saves: Sequence[str] = (),
        kill_at: int = 0,
        data: str = "same",
        epochs: int = EPOCHS,
        **changes: Any,
    ) -> Run:
        """Runs processes to the end of the epochs, or kills them after a step.

        Args:
            processes: Number of processes.
            states: Files of the saved states of all processes; empty for a new run.
            saves: Moments at which a state is saved.
            kill_at: Step after which all processes are killed; 0: none.
            data: Data set, as in `data`.
            epochs: Number of epochs.
            changes: Other changes of the configuration.
        """
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        records = self.records * 6 // 5 if data == "file" else self.records
        config = {"data": self.data(data), "records": records, "processes": processes}
        config |= {"batch": BATCH, "window": self.records // 10, "port": free_port(), **changes}
        job = {"states": states, "saves": saves, "folder": str(folder), "epochs": epochs}
        workers = [
            self._launcher.start({**job, "config": {**config, "process": number}})
            for number in range(processes)
        ]
        result = Run([[] for _ in workers], [], {}, {}, [], [], False)
        reached = [threading.Event() for _ in workers]
        ends = [False] * processes

        def read(number: int) -> None:
            for line in workers[number].events:
                event = json.loads(line)
                if "ids" in event:
                    result.batches[number].append(
                        judge.Batch(event["epoch"], tuple(event["ids"]), tuple(event["values"]))
                    )
                    if len(result.batches[number]) == 1 and number == 0:
                        result.seconds.append(event["seconds"])
                    if event["step"] == kill_at:
                        reached[number].set()
                elif "saved" in event:
                    result.saved.setdefault(event["saved"], []).append(event["path"])
                    result.sizes[event["saved"]] = event["bytes"]
                elif "warning" in event:
                    result.warnings.append(event["warning"])
                elif "error" in event:
                    result.errors.append(event["error"].replace(f"{HERE.parent}/", ""))
                elif "end" in event:
                    ends[number] = True
            reached[number].set()

        threads = [threading.Thread(target=read, args=[k], daemon=True) for k in range(processes)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + TIMEOUT
        while not all(event.is_set() for event in reached):
            if result.errors or time.monotonic() > deadline:
                time.sleep(1 if result.errors else 0)  # for the errors of the other processes
                break
            time.sleep(0.01)
        for worker in workers:
            worker.kill()
        for worker, thread in zip(workers, threads):
            thread.join()
            worker.events.close()
        result.ended = all(ends)
        for paths in result.saved.values():
            paths.sort()
        if not kill_at and not all(ends) and not result.errors:
            result.errors.append(f"no end after {TIMEOUT} seconds")
        return result

    def whole(self, processes: int, shuffle: str) -> Run:
        """Returns an uninterrupted run."""
        key = ("whole", processes, shuffle)
        if key not in self._memo:
            self._memo[key] = self._checked(self.run(processes, shuffle=shuffle))
        return self._memo[key]

    def moments(self, processes: int, shuffle: str) -> tuple[dict[str, str], int]:
        """Returns the moments at which a killed run saves, and the steps of the first epoch.

        An epoch has more steps if each worker process of a loader ends with an incomplete batch.
        """
        steps = sum(batch.epoch == 0 for batch in self.whole(processes, shuffle).merged)
        middle = str(self.records // BATCH * 2 // 5)
        after = str(steps) if self.facts["stream"] else "epoch 1"
        return {"middle": middle, "end": str(steps), "after": after}, steps

    def killed(self, processes: int, shuffle: str) -> Run:
        """Returns a run that was killed two batches after the first epoch, with its states."""
        key = ("killed", processes, shuffle)
        if key not in self._memo:
            moments, steps = self.moments(processes, shuffle)
            run = self.run(
                processes, saves=list(moments.values()), kill_at=steps + 2, shuffle=shuffle
            )
            self._memo[key] = self._checked(run)
        return self._memo[key]

    def _checked(self, run: Run) -> Run:
        """Returns a run without a change, which must not fail."""
        if run.errors:
            raise RuntimeError(f"{self.loader}: {run.errors}; see {self._folder}")
        return run

    def resumed(self, case: Case) -> tuple[Run, list[judge.Batch]]:
        """Returns the resumed run of a case, and all batches that the model was trained on."""
        first = self.killed(case.before, case.shuffle)
        moments, steps = self.moments(case.before, case.shuffle)
        moment = moments[case.saved]
        step = steps if case.saved != "middle" else int(moment)
        options = {"data": case.data, "shuffle": case.shuffle, **case.changes}
        delivered, states = first.merged[:step], first.saved[moment]
        if case.twice:
            again = self.records // BATCH * 3 // 5
            second = self.run(states=states, saves=[str(again)], kill_at=again + 2, **options)
            delivered += second.merged[: again - step]
            states = second.saved.get(str(again), [])
            if second.errors or not states:
                return second, delivered
        last = self.run(case.after, states=states, **options)
        return last, delivered + last.merged

    def baseline(self) -> set[str]:
        """Returns warnings of a resumed run without any change."""
        key = ("resumed",)
        if key not in self._memo:
            self._memo[key] = self.resumed(CASES["middle"])[0]
        return set(self._memo[key].warnings)

    def answer(self, name: str) -> Result:
        """Runs a case."""
        case = CASES[name]
        if name in self.facts["not_offered"]:
            return Result(NOT_OFFERED, self.facts["not_offered"][name])
        if name == "evaluation":
            return self._evaluation()
        run, delivered = self.resumed(case)
        expected = self.whole(case.before, case.shuffle).merged
        if case.notices:
            return self._notice(name, run, delivered, expected)
        if run.errors:
            return Result(REFUSED, beginning(run.errors[0]), {"error": run.errors[0]})
        verdict = judge.compare(expected, delivered)
        figures = dataclasses.asdict(verdict)
        return Result(YES if verdict.equal else NO, describe(figures), figures)

    def _notice(
        self,
        name: str,
        run: Run,
        delivered: Sequence[judge.Batch],
        expected: Sequence[judge.Batch],
    ) -> Result:
        if run.errors:
            return Result(YES, f"error: {beginning(run.errors[0])}", {"error": run.errors[0]})
        verdict = judge.compare(expected, delivered)
        figures = dataclasses.asdict(verdict)
        repeated, lost = judge.counts(delivered, range(self.records))
        figures |= {"repeated": repeated, "lost": lost}
        warned = sorted(set(run.warnings) - self.baseline())
        if warned:
            return Result(YES, f"warning: {beginning(warned[0])}", figures)
        if verdict.equal:
            return Result(NO, "continues as saved", figures)
        if name == "transform":
            return Result(NO, "continues with the other transform", figures)
        first_epoch = f"in the epoch of the restart: {repeated} repeated, {lost} lost"
        return Result(NO, first_epoch, figures)

    def _evaluation(self) -> Result:
        run = self.run(epochs=1, **EVALUATION)
        if run.errors:
            return Result(REFUSED, beginning(run.errors[0]), {"error": run.errors[0]})
        repeated, lost = judge.counts(run.merged, range(self.records))
        batches = [len(batches) for batches in run.batches]
        figures = {"repeated": repeated, "lost": lost, "batches": batches}
        details = f"{repeated} repeated, {lost} lost" if repeated or lost else ""
        if len(set(batches)) > 1:
            details = ", ".join(
                filter(None, [details, f"batches of the processes: {spelled(batches)}"])
            )
        return Result(NO if repeated or lost else YES, details, figures)

    def close(self) -> None:
        """Ends the server of the loader."""
        self._launcher.close()

    def costs(self) -> dict[str, Any]:
        """Returns the size of a state and seconds to the first batch, of an undisturbed machine."""
        killed = self.killed(1, "full")
        moment = self.moments(1, "full")[0]["middle"]
        seconds = []
        for states in ([], killed.saved[moment]):
            run = self.run(states=states, kill_at=1 if not states else int(moment) + 1)
            seconds.append(run.seconds[0] if run.seconds else None)
        return {"bytes": killed.sizes[moment], "new": seconds[0], "resumed": seconds[1]}


def spelled(numbers: Sequence[int]) -> str:
    """Returns numbers as text."""
    return ", ".join(map(str, numbers))


def beginning(message: str) -> str:
    """Returns the beginning of a message in a line, with names of files instead of paths."""
    if "Original Traceback" in message:  # of a worker of PyTorch
        message = message.strip().splitlines()[-1]
    message = re.sub(r"\{\{.*?\}\}", "", message)  # nodes of TensorFlow
    words = [pathlib.Path(word).name if word.startswith("/") else word for word in message.split()]
    return textwrap.shorten(" ".join(words).replace("|", "/"), 180, placeholder=" ...")


def describe(figures: Mapping[str, int]) -> str:
    """Returns the figures of a `judge.Verdict` that are not 0."""
    names = {
        "repeated": "repeated",
        "lost": "lost",
        "moved": "moved",
        "augmented": "redrawn",
    }
    return ", ".join(f"{figures[key]} {name}" for key, name in names.items() if figures[key])


def measure(
    loader: str, cases: Sequence[str], folder: pathlib.Path, records: int
) -> tuple[Session, dict[str, Result]]:
    """Runs the cases of a loader."""
    (folder / loader).mkdir()
    session = Session(loader, folder / loader, records)
    results = {}
    for name in cases:
        results[name] = result = session.answer(name)
        print(f"{loader} {name}: {result.answer} {result.details}".rstrip(), flush=True)
    return session, results


def print_answers(
    results: Mapping[str, Mapping[str, Result]], sessions: Mapping[str, Session]
) -> None:
    """Prints the answers of all cases, a table for each group of cases."""
    for number in range(3):
        names = [name for name, case in CASES.items() if case.table == number]
        chosen = [name for name in names if any(name in row for row in results.values())]
        if chosen:
            report.table(
                ["loader", *(CASES[name].title for name in chosen)],
                [
                    [sessions[loader].facts["title"], *(row[name].answer for name in chosen)]
                    for loader, row in results.items()
                ],
            )


def print_details(
    results: Mapping[str, Mapping[str, Result]], sessions: Mapping[str, Session]
) -> None:
    """Prints the figures of the answers, with the options of the command that repeats them.

    Cases of a loader with equal figures share a row, unless the answer is "no".
    """
    for answer, column in (
        (NO, "difference"),
        (REFUSED, "error"),
        (NOT_OFFERED, "source"),
        (YES, "notice"),
    ):
        rows: dict[tuple[str, ...], list[str]] = {}
        for loader, row in results.items():
            for name, result in row.items():
                if result.answer != answer or not (result.details or answer == NO):
                    continue
                if name != "evaluation" or answer == NO:
                    case = name if answer == NO else ""
                    rows.setdefault((loader, result.details, case), []).append(name)
        report.table(
            ["loader", f'"{answer}"', column, "options of the command"],
            [
                (
                    sessions[loader].facts["title"],
                    "; ".join(CASES[name].title for name in names),
                    text,
                    f"`--loader {loader} --case {' '.join(names)}`",
                )
                for (loader, text, _), names in rows.items()
            ],
        )


def evaluated(row: Mapping[str, Result]) -> str:
    """Returns the figures of an evaluation in which each record counts once."""
    result = row["evaluation"]
    return f"({result.details})" if result.answer == YES and result.details else ""


def print_costs(
    costs: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, Mapping[str, Result]],
    sessions: Mapping[str, Session],
) -> None:
    """Prints sizes and times, and the versions."""

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    report.table(
        ["loader", "state, bytes", "new run, s", "resumed, s", "evaluation", "random numbers"],
        [
            (
                session.facts["title"],
                f"{costs[name]['bytes']:,}",
                seconds(costs[name]["new"]),
                seconds(costs[name]["resumed"]),
                " ".join(
                    filter(None, [results[name]["evaluation"].answer, evaluated(results[name])])
                ),
                session.facts["augmentation"],
            )
            for name, session in sessions.items()
        ],
    )
    versions: dict[str, str] = {}
    for session in sessions.values():
        versions |= session.facts["versions"]
    report.table(["package", "version"], sorted(versions.items()))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--loader", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--records", type=int, default=1000, help="a multiple of 200")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=pathlib.Path, help="keeps data, states and errors here")
    parser.set_defaults(out=None)
    args = parser.parse_args()
    complete = args.loader == list(LOADERS)
    report.heading()
    for environment in sorted({LOADERS[name] for name in args.loader}):
        try:
            python_of(environment)
        except subprocess.CalledProcessError as error:
            print(f"the loaders of .venv-resume-{environment} are left out: {error}")
            args.loader = [name for name in args.loader if LOADERS[name] != environment]
    with contextlib.ExitStack() as stack:
        folder = args.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(args.jobs))
        futures = {
            name: pool.submit(measure, name, args.case, folder, args.records)
            for name in args.loader
        }
        sessions, results = {}, {}
        for name, future in futures.items():
            if error := future.exception():
                print(f"{name} is left out: {error}")
            else:
                sessions[name], results[name] = future.result()
                stack.callback(sessions[name].close)
        print_answers(results, sessions)
        costs: dict[str, dict[str, Any]] = {}
        if args.case == list(CASES):
            costs = {name: session.costs() for name, session in sessions.items()}
            print_costs(costs, results, sessions)
        print_details(results, sessions)
    if costs and (args.out or complete):
        report.write(
            args.out or report.RESULTS,
            "resume",
            {
                name: {case: dataclasses.asdict(result) for case, result in row.items()}
                for name, row in results.items()
            },
            {
                title: {
                    sessions[name].facts["title"]: cost[key]
                    for name, cost in costs.items()
                    if cost[key] is not None
                }
                for title, key in (("new run", "new"), ("resumed run", "resumed"))
            },
            "seconds to the first batch",
        )


if __name__ == "__main__":
    main()
