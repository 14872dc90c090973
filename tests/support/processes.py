"""Runs a worker in several processes, which connect through jax.distributed."""

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
    """Returns a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def launched(worker, tmp_path, options, processes=PROCESSES):
    """Starts the processes of a worker, each with a file for its report."""
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
    """Runs a worker in several processes and returns their reports."""
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
    """Connects a worker to the other processes, before it uses a device; returns its options."""
    options = json.loads(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.get("devices", 1))
    if options["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"localhost:{options['port']}"
        jax.distributed.initialize(address, options["processes"], options["process"])
    return options


def leave(options, report):
    """Reports a worker's result, and waits for the other processes."""
    pathlib.Path(options["report"]).write_text(json.dumps(report))
    if options["processes"] > 1:
        jax.distributed.shutdown()


def report(options, functions):
    """Runs the functions named by ``scenarios`` in a worker, in step, and reports their results.

    All processes begin each function together.
    """
    from jax.experimental import multihost_utils

    results = {}
    for name in options["scenarios"]:
        results[name] = functions[name]()
        multihost_utils.sync_global_devices(name)
    leave(options, results)
