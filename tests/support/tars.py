"""Small tars of numbered samples."""

import io
import tarfile

import numpy as np

FIELDS = {"data": "jpg", "label": "cls"}


def write_tar(path, entries, form=tarfile.PAX_FORMAT):
    """Writes a tar of (name, content) pairs, or of TarInfos without content."""
    with tarfile.open(path, "w", format=form) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
                continue
            name, content = entry
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def numbered_bytes(record, size):
    """Returns the content of a record, which no other record of the same size has."""
    return np.random.default_rng(record).bytes(size + record)


def write_numbered(folder, tars, samples, size, shift=0):
    """Writes tars of numbered records, whose contents are those of records ``shift`` later."""
    for tar in range(tars):
        entries = []
        for k in range(tar * samples, (tar + 1) * samples):
            entries.append((f"{k:04d}.bin", numbered_bytes(k + shift, size)))
            entries.append((f"{k:04d}.cls", b"%d" % k))
        write_tar(folder / f"{tar}.tar", entries)


def sample(i, size=40):
    return [(f"{i:04d}.jpg", bytes([i % 256]) * (size + i)), (f"{i:04d}.cls", b"%d" % (i - 3))]


def samples(start, stop):
    return [entry for i in range(start, stop) for entry in sample(i)]
