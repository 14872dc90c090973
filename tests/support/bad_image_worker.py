"""A program that decodes batches of 64 images with a single invalid image, which could crash DALI.

python bad_image_worker.py HOW:BAD[,HOW:BAD...] [DEVICE]

DEVICE is the device of DALI's decoders. Prints which rows of the batches are valid, as a line of
JSON for each case.
"""

import io
import json
import pathlib
import struct
import sys
import tempfile

import grain
import numpy as np
from nvidia.dali import fn, ops
from PIL import Image

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform
from dalijax.fn import read_file

BATCH, COUNT, WRONG = 64, 128, 70  # in the second batch, followed by 57 images
MASKS = [[row != WRONG for row in range(begin, begin + BATCH)] for begin in (0, BATCH)]
device = "cpu"


def encoded(form, mode="RGB", **options):
    file = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), 90, np.uint8)).convert(mode).save(file, form, **options)
    return file.getvalue()


def odd_webp():
    """Returns a WebP with EXIF data after a chunk of odd length."""
    header = b"VP8X" + struct.pack("<IIHBHB", 10, 8, 29, 0, 19, 0)
    pixels = encoded("WEBP", lossless=True)[20:]
    pixels = pixels if len(pixels) % 2 else pixels + b"\0"
    chunk = b"VP8L" + struct.pack("<I", len(pixels)) + pixels + b"\0"
    exif = b"EXIF" + struct.pack("<I", 26) + b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\1" + bytes(7)
    body = b"WEBP" + header + chunk + exif
    return b"RIFF" + struct.pack("<I", len(body)) + body


GOOD = encoded("JPEG")
BAD = {
    "empty": b"",
    "text": b"<html>404</html>",
    "zeros": bytes(300),
    "cut": GOOD[:40],
    "gif": encoded("GIF"),
    "png": encoded("PNG")[:20],
    "webp": odd_webp(),
    "tiff": encoded("TIFF", "I"),
    "alpha": encoded("TIFF", "LA"),
    "jpeg2000": encoded("JPEG2000", "LA"),
}
CALL = dict(batch_size=BATCH, num_threads=4)


def of_source(source, function):
    make = data_iterator(function, ["x"], source=source, mask="mask", shuffle=False)
    return make(**CALL, on_error="mask")


def of_records(records, function):
    options = dict(output_map=["x"], pad="mask", on_error="mask")
    return iter(grain.MapDataset.source(records).pipe(DALITransform(function, **CALL, **options)))


def decode(data):
    return fn.decoders.image(data, device=device)[0, 0, 0]


def crop(data):
    return fn.decoders.image_random_crop(data, device=device)[0, 0, 0]


def read(path):
    return fn.decoders.image(read_file(path), device=device)[0, 0, 0]


def read_by_operator(path):
    return fn.decoders.image(ops.io.file.Read()(path), device=device)[0, 0, 0]


def padded(path):
    """Decodes a path as DALI does, up to the first zero."""
    return np.frombuffer(path.encode().ljust(256, b"\0"), np.uint8)


HOWS = {
    "records": lambda bytes_, paths: of_source(
        sources.Records([{"data": b} for b in bytes_]), crop
    ),
    "record paths": lambda bytes_, paths: of_source(
        sources.Records([{"path": path.encode()} for path in paths]), read
    ),
    "files": lambda bytes_, paths: of_source(sources.Files(paths=paths), decode),
    "grain": lambda bytes_, paths: of_records([{"data": b} for b in bytes_], decode),
    "grain paths": lambda bytes_, paths: of_records([{"path": p} for p in paths], read),
    "operator": lambda bytes_, paths: of_records([{"path": p} for p in paths], read_by_operator),
    "padded paths": lambda bytes_, paths: of_source(
        sources.Arrays({"path": np.stack([padded(path) for path in paths])}), read
    ),
}


def masks_of(how, bad):
    contents = [GOOD] * COUNT
    contents[WRONG] = BAD[bad]
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{number}.jpg" for number in range(COUNT)]
        for path, data in zip(paths, contents):
            pathlib.Path(path).write_bytes(data)
        iterator = HOWS[how](contents, paths)
        return [np.asarray(batch["mask"]).tolist() for batch in iterator]


def main(cases, device_="cpu"):
    global device
    device = device_
    for case in cases.split(","):
        sys.stdout.write(json.dumps(masks_of(*case.split(":"))) + "\n")
        sys.stdout.flush()  # before the next case could crash


if __name__ == "__main__":
    main(*sys.argv[1:])
