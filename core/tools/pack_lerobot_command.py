"""The command ``python -m dalijax.sources pack-lerobot``, which packs LeRobot data sets."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..messages.printable import printable
from ..robots.lerobot.pack import PackOptions, pack_lerobot
from .command_line import write

_DEFAULTS = PackOptions()


def add_command(commands: Any) -> None:
    """Adds ``pack-lerobot`` to the commands of a parser."""
    parser = commands.add_parser(
        "pack-lerobot",
        help="pack a LeRobot data set as RLDS TFRecords",
        description="Writes the episodes of a LeRobot data set (v2.0, v2.1 or v3: parquet files "
        "with videos or images) as TFRecords that `RLDS`, TensorFlow and TFDS read. An interrupted "
        "run is resumed by the same command.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("root", metavar="ROOT", help="the folder of the LeRobot data set")
    parser.add_argument("out", metavar="OUT", help="the new folder of the TFRecords")
    parser.add_argument("--quality", type=int, default=_DEFAULTS.quality, help="of JPEGs, 1 to 100")
    parser.add_argument(
        "--subsampling",
        choices=("4:2:0", "4:4:4"),
        default=_DEFAULTS.subsampling,
        help="chroma subsampling of JPEGs",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=_DEFAULTS.tolerance,
        metavar="SECONDS",
        help="largest distance between the timestamp of a step and its video frame",
    )
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="number of processes"
    )
    parser.add_argument(
        "--shard-steps",
        type=int,
        default=_DEFAULTS.shard_steps,
        metavar="STEPS",
        help="a file ends with the episode that reaches so many steps",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="FEATURE",
        help="a feature to leave out, such as a camera; may be repeated",
    )
    parser.add_argument("--name", default="", help="name of the data set, default: that of ROOT")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    try:
        chosen = PackOptions(
            options.quality,
            options.subsampling,
            options.tolerance,
            options.shard_steps,
            tuple(options.exclude),
            options.name,
        )
        packed = pack_lerobot(options.root, options.out, chosen, options.workers)
    except KeyboardInterrupt:
        raise SystemExit("interrupted. Run the same command again to resume") from None
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise SystemExit(f"the data set can't be packed: {error}") from error
    kept = f", of which {packed.num_kept:,} were finished" if packed.num_kept else ""
    write(
        f"{printable(options.out)}: {packed.steps:,} steps of {packed.episodes:,} episodes in "
        f"{packed.shards:,} files{kept}, {packed.num_bytes / 1e6:,.1f} MB, {packed.seconds:.0f} s"
    )
    for name, dtype in packed.omitted.items():
        write(f"  left out: {printable(name)}, since {printable(dtype)} is not supported")
