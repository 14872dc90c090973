"""Runs a loader's adapter in processes, which write their batches as lines of JSON.

Usage: ``python -m loaders.worker NAME``, with a job in JSON per line of the standard input. Each
job runs in a process of its own, which `resume.py` kills.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import logging
import os
import pathlib
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from loaders.protocol import Config, Loader


@dataclasses.dataclass
class Progress:
    """The trainer's own position, which it saves with the state of the loader."""

    epoch: int = 0
    step: int = 0
    samples: int = 0


class Log(logging.Handler):
    """Prints events as JSON, including warnings of the loader."""

    def __init__(self, out: TextIO):
        super().__init__(logging.WARNING)
        self._out = out

    def write(self, **event: Any) -> None:
        """Prints an event."""
        print(json.dumps(event), file=self._out, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a logged warning."""
        self.write(warning=record.getMessage())

    def warned(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        """Prints a Python warning; deprecated names are not of interest."""
        if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning)):
            self.write(warning=str(message))


def loader_class(name: str) -> type[Loader]:
    """Returns the class of a loader from ``loaders/NAME.py``."""
    return importlib.import_module(f"loaders.{name}").Adapter


def run(adapter: type[Loader], job: dict[str, Any], log: Log) -> None:
    """Delivers batches, and saves the state after the steps of ``saves``."""
    config = Config(**job["config"])
    begin = time.perf_counter()
    loader = adapter(config)
    progress = Progress()
    if job["states"]:
        files = [pathlib.Path(path) for path in job["states"]]
        progress = Progress(**json.loads(files[0].with_suffix(".json").read_text()))
        loader.load([path.read_bytes() for path in files])
    for ids, values in passes(loader, progress, config, job, log):
        now = time.perf_counter()
        event = {"epoch": progress.epoch, "ids": list(map(int, ids))}
        progress.step += 1
        progress.samples += config.batch
        log.write(
            **event,
            step=progress.step,
            values=list(map(float, values)),
            seconds=now - begin,
        )
        save(loader, progress, config, job, log, str(progress.step))
        begin = time.perf_counter()
    log.write(end=True)
    loader.close()


def passes(
    loader: Loader, progress: Progress, config: Config, job: dict[str, Any], log: Log
) -> Iterator[Any]:
    """Yields the batches of all epochs, as a training loop takes them."""
    if loader.stream:
        for batch in loader.batches(progress.epoch):
            progress.epoch = progress.samples // config.records
            if progress.epoch >= job["epochs"]:
                return
            yield batch
        return
    while progress.epoch < job["epochs"]:
        yield from loader.batches(progress.epoch)
        progress.epoch += 1
        save(loader, progress, config, job, log, f"epoch {progress.epoch}")


def save(
    loader: Loader,
    progress: Progress,
    config: Config,
    job: dict[str, Any],
    log: Log,
    moment: str,
) -> None:
    """Saves the loader's state and the trainer's position if the job lists this moment."""
    if moment not in job["saves"]:
        return
    path = pathlib.Path(job["folder"]) / f"{moment.replace(' ', '-')}-{config.process}.state"
    path.write_bytes(loader.state())
    path.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(progress)))
    log.write(saved=moment, path=str(path), bytes=path.stat().st_size)


def work(name: str, job: dict[str, Any]) -> None:
    """Runs a job in this process, which is a fork of the server."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = pathlib.Path(job["folder"])
    os.chdir(folder)
    with (folder / "stderr.txt").open("a") as stderr:
        for descriptor in (1, 2):  # libraries may print to the standard output
            os.dup2(stderr.fileno(), descriptor)
    log = Log(open(job["events"], "w"))  # noqa: SIM115
    log.write(pid=os.getpid())
    warnings.showwarning = log.warned  # type: ignore[assignment]
    logging.getLogger().addHandler(log)
    try:
        if "shards" in job:
            loader_class(name).write(job["folder"], job["shards"])
        else:
            run(loader_class(name), job, log)
    except Exception as error:
        traceback.print_exc()
        log.write(error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Imports a loader, prints its attributes, and forks a process for each job on the input."""
    name = sys.argv[1]
    adapter = loader_class(name)
    facts = {
        "title": adapter.title,
        "stream": adapter.stream,
        "augmentation": adapter.augmentation,
        "not_offered": dict(adapter.not_offered),
        "versions": {package: importlib.metadata.version(package) for package in adapter.packages},
    }
    print(json.dumps(facts), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended children
    for line in sys.stdin:
        if os.fork() == 0:
            work(name, json.loads(line))
            sys.stdout.flush()
            os._exit(0)


if __name__ == "__main__":
    main()
