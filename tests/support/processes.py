"""Runs a worker in several processes, which find one another by jax.distributed."""

import json
import socket
import subprocess
import sys

PROCESSES = 2


def launched(worker, tmp_path, options, processes=PROCESSES):
    """The processes that run a worker, each with a file for its report."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    running = []
    for process in range(processes):
        own = {
            "port": port,
            "processes": processes,
            "process": process,
            "report": str(tmp_path / f"report{process}.json"),
        }
        command = [sys.executable, worker, json.dumps(options | own)]
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return running


def started(worker, tmp_path, files, options, processes=PROCESSES, timeout=240):
    """The reports of the processes that run a worker."""
    running = launched(worker, tmp_path, options | {"files": files}, processes)
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
