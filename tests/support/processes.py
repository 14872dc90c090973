"""Runs a worker in several processes, which find one another by jax.distributed."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax

PROCESSES = 2
SUPPORT = str(pathlib.Path(__file__).parent)


def free_port():
    """A port of this machine that nobody has."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def launched(worker, tmp_path, options, processes=PROCESSES):
    """The processes that run a worker, each with a file for its report."""
    port = free_port()
    path = os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH"))))
    running = []
    for process in range(processes):
        own = {
            "port": port,
            "processes": processes,
            "process": process,
            "report": str(tmp_path / f"report{process}.json"),
        }
        running.append(
            subprocess.Popen(
                [sys.executable, worker, json.dumps(options | own)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        )
    return running


def started(worker, tmp_path, options, processes=PROCESSES, timeout=300):
    """The reports of the processes that run a worker."""
    running = launched(worker, tmp_path, options, processes)
    for process in running:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            for other in running:
                if process.poll() != 0:
                    other.kill()
        told = [line for line in output.splitlines() if "[Gloo]" not in line]
        assert process.returncode == 0, "\n".join(told[-40:])
    return [json.loads((tmp_path / f"report{p}.json").read_text()) for p in range(processes)]


def join():
    """In a worker, before it uses a device: its options, when it has found the others."""
    options = json.loads(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.get("devices", 1))
    if options["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"localhost:{options['port']}"
        jax.distributed.initialize(address, options["processes"], options["process"])
    return options


def leave(options, report):
    """In a worker, at its end: reports, and waits for the others."""
    pathlib.Path(options["report"]).write_text(json.dumps(report))
    if options["processes"] > 1:
        jax.distributed.shutdown()


def report(options, functions):
    """In a worker: runs the functions named by ``scenarios``, in step, and reports their results.

    All processes begin each function together.
    """
    from jax.experimental import multihost_utils

    results = {}
    for name in options["scenarios"]:
        results[name] = functions[name]()
        multihost_utils.sync_global_devices(name)
    leave(options, results)
