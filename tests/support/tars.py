"""Small tars of numbered samples."""

import io
import tarfile

FIELDS = {"jpg": "data", "cls": "label"}


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


def sample(i, size=40):
    return [(f"{i:04d}.jpg", bytes([i % 256]) * (size + i)), (f"{i:04d}.cls", b"%d" % (i - 3))]


def samples(start, stop):
    return [entry for i in range(start, stop) for entry in sample(i)]
