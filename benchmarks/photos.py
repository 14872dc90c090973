"""JPEGs for benchmarks: photographs of scikit-image if it is installed, else generated images."""

from __future__ import annotations

import io
import pathlib
import tarfile

import numpy as np
from PIL import Image

from dalijax.core.formats.example_message import example_message, record_parts

SIZE = (500, 375)


def photographs() -> list[Image.Image]:
    """Returns images from which samples are cropped."""
    try:
        from skimage import data
    except ImportError:
        rng = np.random.default_rng(0)
        noise = [rng.integers(0, 256, (24, 32, 3), np.uint8) for _ in range(4)]
        return [Image.fromarray(n).resize((1000, 750), Image.Resampling.BICUBIC) for n in noise]
    names = ("astronaut", "coffee", "chelsea", "rocket")
    return [Image.fromarray(getattr(data, name)()).convert("RGB") for name in names]


def make(folder: pathlib.Path, count: int) -> list[str]:
    """Writes `count` JPEGs of 500 x 375 pixels (about 50 kB) and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    sources, rng, files = photographs(), np.random.default_rng(0), []
    for i in range(count):
        path = folder / f"{i:06d}.jpg"
        files.append(str(path))
        if path.exists():
            continue
        image = sources[i % len(sources)]
        width, height = image.size
        left, top = rng.uniform(0, 0.3, 2) * (width, height)
        box = (left, top, left + 0.7 * width, top + 0.7 * height)
        image.resize(SIZE, Image.Resampling.BICUBIC, box=box).save(path, quality=92)
    return files


def tars(
    folder: pathlib.Path, files: list[str], count: int = 1, classes: int = 1 << 31
) -> list[str]:
    """Packs the files into `count` tars in WebDataset's format, and returns their paths.

    The label of a file is its number modulo the number of classes. Consecutive files are crops of
    different photographs, whose decoding times differ, so that all tars take the same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{part}-of-{count}.tar" for part in range(count)]
    for part, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for number in range(part * len(files) // count, (part + 1) * len(files) // count):
                for kind, data in (
                    ("jpg", pathlib.Path(files[number]).read_bytes()),
                    ("cls", str(number % classes).encode()),
                ):
                    member = tarfile.TarInfo(f"{number:06d}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return [str(path) for path in paths]


def tfrecord(path: pathlib.Path, files: list[str]) -> str:
    """Packs the files and their numbers into a TFRecord of tf.train.Examples; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        for number, file in enumerate(files):
            image = pathlib.Path(file).read_bytes()
            data = example_message({"image": [image], "label": np.array([number])})
            out.writelines(record_parts(data))
    return str(path)


def array_record(path: pathlib.Path, files: list[str]) -> str:
    """Packs the files into an ArrayRecord; returns its path."""
    from array_record.python import array_record_module

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for file in files:
        writer.write(pathlib.Path(file).read_bytes())
    writer.close()
    return str(path)


def huggingface(path: pathlib.Path, files: list[str]) -> str:
    """Saves the files and their numbers as a data set of HuggingFace; returns its path."""
    import datasets

    images = [{"bytes": pathlib.Path(file).read_bytes(), "path": None} for file in files]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": images, "label": list(range(len(files)))}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(path))
    return str(path)
