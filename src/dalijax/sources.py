"""Sources: random access to records, for batches that depend only on seed, epoch and step.

- `Files`: files of class folders, of a flat folder, or of a list.
- `Coco`: images with boxes, labels and masks, in COCO's format.
- `Tar`: samples of tars, as WebDataset packs them.
- `TFRecord`: records of tf.train.Example, without TensorFlow.
- `RLDS`: steps of robot episodes, as TFDS, Open X-Embodiment and DROID store them.
- `Parquet`: rows of Parquet files, such as those of the HuggingFace Hub.
- `Records`: objects with ``len()`` and ``[]`` (Grain's sources, TFDS, HuggingFace).
- `Arrays`: rows of arrays.
- `Mixture`: several sources in exact proportions.
- `Selection`: some of the records of a source.
- `Named`: a source with the name or number of each record in the batch.
- `Buckets`: images in batches of one size and aspect ratio.
- `MultiImage`: records with several images.
- `Packed`: images at their own resolution, as rows of tokens.
- `Source` and `Field`: the base class and the types of fields, for your own sources.
"""

import typing as _typing

from .core.formats.field import Field as Field
from .core.messages import replacements as _replacements
from .core.robots.rlds import RLDS as RLDS
from .core.sources.arrays import Arrays as Arrays
from .core.sources.buckets import Buckets as Buckets
from .core.sources.coco import Coco as Coco
from .core.sources.files import Files as Files
from .core.sources.map import Map as _Map  # noqa: F401 for Source.map
from .core.sources.mixture import Mixture as Mixture
from .core.sources.multi_image import MultiImage as MultiImage
from .core.sources.named import Named as Named
from .core.sources.packed import Packed as Packed
from .core.sources.parquet import Parquet as Parquet
from .core.sources.records import Records as Records
from .core.sources.selection import Selection as Selection
from .core.sources.source import Source as Source
from .core.sources.tar import Tar as Tar
from .core.sources.tfrecord import TFRecord as TFRecord

__all__ = [
    "RLDS",
    "Arrays",
    "Buckets",
    "Coco",
    "Field",
    "Files",
    "Mixture",
    "MultiImage",
    "Named",
    "Packed",
    "Parquet",
    "Records",
    "Selection",
    "Source",
    "TFRecord",
    "Tar",
]

if not _typing.TYPE_CHECKING:  # type checkers would accept misspelled names

    def __getattr__(name: str) -> _typing.Any:
        raise _replacements.no_attribute("dalijax.sources", name, __all__, _replacements.SOURCES)


if __name__ == "__main__":
    import argparse

    from .core.tools import cache_command, index_command, pack_lerobot_command

    parser = argparse.ArgumentParser(
        prog="python -m dalijax.sources",
        description=__doc__,
        epilog="help(dalijax.sources.Tar) describes the arguments of a source in Python.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers()
    index_command.add_command(commands)
    cache_command.add_command(commands)
    pack_lerobot_command.add_command(commands)
    options = parser.parse_args()
    if "run" in options:
        options.run(options)
    else:
        parser.print_help()
