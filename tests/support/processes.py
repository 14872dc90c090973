"""Runs a worker in several processes, which connect through jax.distributed."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
from forks import Fork

PROCESSES = 2
MODULES = ("grain", "orbax.checkpoint", "jax.experimental.multihost_utils")
SUPPORT = str(pathlib.Path(__file__).parent)


def free_port():
    """Returns a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def commands(tmp_path, options, processes):
    """Returns the argument of each process, and the environment variables of all."""
    port = free_port()
    path = os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH"))))
    arguments = [
        options
        | {
            "port": port,
            "processes": processes,
            "process": process,
            "report": str(tmp_path / f"report{process}.json"),
        }
        for process in range(processes)
    ]
    return list(map(json.dumps, arguments)), {**os.environ, "PYTHONPATH": path}


def forked(worker, tmp_path, options, processes=PROCESSES, **kind):
    """Starts the processes of a worker in forks of two processes.

    Addresses and hash seeds of the two processes differ.
    """
    arguments, env = commands(tmp_path, options, processes)
    return [
        Fork(worker, argument, modules=MODULES, env=env, number=process % 2, **kind)
        for process, argument in enumerate(arguments)
    ]


def launched(worker, tmp_path, options, processes=PROCESSES):
    """Starts the processes of a worker, each with a file for its report."""
    arguments, env = commands(tmp_path, options, processes)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return [
        subprocess.Popen([sys.executable, worker, argument], text=True, env=env, **pipes)
        for argument in arguments
    ]


def started(worker, tmp_path, options, processes=PROCESSES, timeout=300):
    """Runs a worker in several processes and returns their reports."""
    running, results = forked(worker, tmp_path, options, processes), []
    for fork in running:  # if one fails, the others do not come to an end
        failed = any(code != 0 for code, *_ in results)
        results.append(fork.result(1 if failed else timeout))
    for code, out, err in results:
        told = [line for line in (out + err).splitlines() if "[Gloo]" not in line]
        assert code == 0, "\n".join([f"exit code {code}", *told[-40:]])
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
