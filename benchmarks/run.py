"""Runs the benchmarks that need no GPU, in some minutes.

Tables are printed, and all values are written to ``benchmarks/results`` as JSON. For other
settings, run the programs directly; ``--help`` lists their options::

    make bench ARGS=overhead
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
COMMANDS = {
    "overhead": ["--rounds", "5", "--batches", "20"],
    "function_cost": ["--rounds", "5", "--batches", "10"],
    "throughput": [
        *("--files", "512", "--batch", "64", "--rounds", "3", "--seconds", "1.5"),
        *("--threads", "2", "--workers", "2"),
        *("--match", "raw|plugin|data_iterator|Dataset|packed bytes|DataLoader|OpenCV|tf.data"),
    ],
    "augment": ["--rounds", "5", "--batches", "4"],
    "media": ["--rounds", "7", "--batches", "4"],
    "maps": ["--rounds", "5", "--seconds", "0.3"],
    "elastic": [
        *("--small", "--batch", "24", "--steps", "60", "--save-every", "5"),
        *("--files", "96", "--threads", "1"),
    ],
    "cores": ["--small"],
    "resume": [],
    "packed_rows": ["--images", "100000", "--subset", "2000", "--middle", "11"],
    "remote": [
        *("--files", "512", "--tars", "64", "--latencies", "1", "50"),
        *("--seconds", "3", "--servers", "1", "--threads", "2", "--read-ahead", "4MB"),
    ],
    "robot": ["--episodes", "60", "--seconds", "5"],
}


def main() -> None:
    chosen = sys.argv[1:] or list(COMMANDS)
    unknown = sorted(set(chosen) - set(COMMANDS))
    if unknown:
        sys.exit(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(COMMANDS)}")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    failed = []
    for name in chosen:
        print(f"== {name} {' '.join(COMMANDS[name])}", flush=True)
        begin = time.monotonic()
        command = [sys.executable, str(HERE / f"{name}.py"), *COMMANDS[name]]
        if subprocess.run(command, env=environment).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - begin:.0f} s\n", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
