"""Sizes from the first bytes of images: against whole images, Pillow, and the requested ranges."""

import io
import os
import resource

import numpy as np
import pytest
from PIL import Image, ImageOps

from dalijax import sources
from dalijax.core.formats.example_message import example_message, record_parts
from dalijax.core.formats.image_size import HEAD, look_at_file
from dalijax.core.formats.spread import spread
from dalijax.core.sources.source import sizes_in_heads
from range_server import serving
from tars import write_tar

FIELDS = {"data": "img", "label": "cls"}
FEATURES = {"data": "image", "label": "label"}
LARGE = 10**6  # tokens: an image of this length isn't resized


def encoded(form, number=0, orientation=None, shape=(150, 200), **options):
    pixels = np.random.default_rng(number).integers(0, 256, (*shape, 3), np.uint8)
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][0x112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


PHOTOS = [
    encoded("JPEG", orientation, orientation, (150 + 2 * orientation, 200), quality=95)
    for orientation in range(1, 9)
]
OTHERS = [
    encoded("JPEG", 9, 6, icc_profile=bytes(2 * HEAD)),
    *(encoded("PNG", k, k) for k in (1, 6)),
    *(encoded("WEBP", k, k) for k in (1, 6)),
    *(encoded("TIFF", k, k) for k in (1, 8)),
    encoded("BMP"),
    encoded("PPM"),
    encoded("JPEG2000"),
    *(encoded(form, 7, 6, (20, 30)) for form in ("JPEG", "PNG", "WEBP")),  # shorter than a head
]
ALL = [*PHOTOS, *OTHERS, b"no image", b""]


def size_by_pillow(data):
    try:
        return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size[::-1]
    except OSError:
        return None


def sizes_of(source, **options):
    """Returns the sizes by which `Packed` plans; 1 x 1 for images that it can't read."""
    packed = sources.Packed(source, length=LARGE, images=4, patch=1, **options)
    sizes = packed.grids.tolist()
    assert packed.num_unreadable == sizes.count([1, 1])
    return [tuple(size) for size in sizes]


def expected(images):
    return [size_by_pillow(data) or (1, 1) for data in images]


def write_records(path, images):
    records = [
        example_message({"image": [data], "label": np.array([k])}) for k, data in enumerate(images)
    ]
    path.write_bytes(b"".join(part for data in records for part in record_parts(data)))
    return path


def written_tar(path, images):
    entries = [
        entry
        for k, data in enumerate(images)
        for entry in ((f"{k:04d}.img", data), (f"{k:04d}.cls", b"%d" % k))
    ]
    return write_tar(path, entries)


def written_files(folder, images):
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{k:04d}.jpg" for k in range(len(images))]
    for path, data in zip(paths, images):
        path.write_bytes(data)
    return [*map(str, paths)]


def tar(folder, images, **options):
    return sources.Tar(written_tar(folder / "a.tar", images), FIELDS, **options)


def tfrecord(folder, images, **options):
    path = write_records(folder / "a.tfrecord", images)
    return sources.TFRecord(str(path), FEATURES, **options)


def files(folder, images):
    return sources.Files(paths=written_files(folder / "files", images))


MAKERS = {
    "Tar": tar,
    "TFRecord": tfrecord,
    "TFRecord unverified": lambda *arguments: tfrecord(*arguments, verify=False),
    "Files": files,
    "Records": lambda _, images: sources.Records([{"data": data} for data in images]),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", MAKERS)
def test_sizes_are_those_of_pillow(name, tmp_path):
    source = MAKERS[name](tmp_path, ALL)
    assert sizes_of(source) == expected(ALL)
    wrapped = sources.Named(sources.Selection(source, np.arange(1, len(ALL))), "name")
    assert sizes_of(wrapped) == expected(ALL)[1:]
    assert sizes_of(sources.Mixture([(source, 1), (source, 2)])) == 2 * expected(ALL)


def test_sources_read_heads_unless_a_map_returns_the_images(tmp_path):
    source = tar(tmp_path, ALL)
    rows = np.arange(len(PHOTOS))[::-1]
    sizes = [size_by_pillow(PHOTOS[row]) for row in rows]

    def sizes_by(source):
        return [*map(tuple, sizes_in_heads(source, rows, "data").tolist())]

    unknown = [(0, 0)] * len(rows)
    for known in (
        source,
        tfrecord(tmp_path, ALL),
        sources.Named(source, "name"),
        sources.Selection(source, np.arange(len(PHOTOS))),
        sources.Mixture([(source, 1), (source, 1)]),
        source.map(lambda record: {"label": record["label"]}, inputs=["label"]),
    ):
        assert sizes_by(known) == sizes, known
    for whole in (
        source.map(lambda record: {"data": record["data"]}, inputs=["data"]),
        sources.Records([{"data": data} for data in ALL]),
        sources.TFRecord(str(tmp_path / "a.tfrecord"), FEATURES, defaults={"data": b""}),
        sources.Mixture([(files(tmp_path, ALL), 1)]),
    ):
        assert sizes_by(whole) == unknown, whole
    named = sources.Named(source, "name")
    assert protocol_heads(named, "name") is None and protocol_heads(source, "label") is None


def protocol_heads(source, name):
    return source._heads(np.arange(2), name, HEAD)


def test_texts_are_read_with_the_sizes(tmp_path):
    examples = [
        example_message({"image": [data], "ids": np.arange(k % 5) + 300})
        for k, data in enumerate(ALL)
    ]
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(part for data in examples for part in record_parts(data)))
    ndim = {"kinds": {"ids": sources.Field(np.int32, 1)}}
    source = sources.TFRecord(str(path), {"data": "image", "ids": "ids"}, **ndim)
    packed = sources.Packed(source, length=LARGE, images=4, patch=1, text="ids")
    sizes = [size_by_pillow(data) for data in ALL]
    lengths = [size[0] * size[1] + k % 5 if size else 0 for k, size in enumerate(sizes)]
    assert packed.lengths.tolist() == lengths


def test_a_damaged_record_has_no_size(tmp_path):
    path = write_records(tmp_path / "a.tfrecord", PHOTOS)
    data = bytearray(path.read_bytes())
    data[data.index(PHOTOS[2]) + len(PHOTOS[2]) - 1] ^= 1  # after the head
    assert len(PHOTOS[2]) > 2 * HEAD
    path.write_bytes(data)
    wanted = expected(PHOTOS)
    assert sizes_of(sources.TFRecord(str(path), FEATURES, verify=False)) == wanted
    wanted[2] = (1, 1)
    assert sizes_of(sources.TFRecord(str(path), FEATURES, identity="photographs")) == wanted


def test_too_many_open_files_are_not_unreadable_images(tmp_path):
    paths = written_files(tmp_path / "files", PHOTOS)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    look_at_file(os.fsencode(paths[0]))  # imports the parser
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            look_at_file(os.fsencode(paths[0]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    source = sources.Files(paths=paths, identity="photographs")
    os.unlink(paths[5])  # a missing file is an error of its record
    wanted = expected(PHOTOS)
    wanted[5] = (1, 1)
    assert sizes_of(source) == wanted


@pytest.fixture
def server(tmp_path):
    root = tmp_path / "served" / "bucket"
    root.mkdir(parents=True)
    written_tar(root / "a.tar", ALL)
    write_records(root / "a.tfrecord", ALL)
    written_files(root / "files", ALL)
    with serving(tmp_path / "served") as (url, server):
        server.url = url
        keys = {"key": "a", "secret": "b", "region": "us-east-1"}
        server.options = {**keys, "endpoint_url": url, "retry_timeout": 3}
        yield server


def remote_sources(server, **options):
    http = {"retry_timeout": 3}
    urls = [f"{server.url}/bucket/files/{k:04d}.jpg" for k in range(len(ALL))]
    return {
        "Tar": lambda: sources.Tar(
            "s3://bucket/a.tar", FIELDS, storage_options=server.options, **options
        ),
        "Tar over HTTP": lambda: sources.Tar(
            f"{server.url}/bucket/a.tar", FIELDS, storage_options=http, **options
        ),
        "TFRecord": lambda: sources.TFRecord(
            "s3://bucket/a.tfrecord", FEATURES, storage_options=server.options, **options
        ),
        "Files": lambda: sources.Files(
            "s3://bucket/files", storage_options=server.options, **options
        ),
        "Files over HTTP": lambda: sources.Files(paths=urls, storage_options=http, **options),
    }


REMOTE = ("Tar", "Tar over HTTP", "TFRecord", "Files", "Files over HTTP")


@pytest.mark.parametrize("name", REMOTE)
def test_sizes_of_remote_photographs_need_their_heads(name, server):
    pytest.importorskip("obstore")
    source = remote_sources(server)[name]()
    assert sizes_of(source) == expected(ALL)
    photos = sources.Selection(source, np.arange(len(PHOTOS)))
    source.identity()
    server.ranges.clear()
    sizes_in_heads(photos, np.arange(len(PHOTOS)), "data")
    num_bytes = sum(end - start for _, start, end in server.ranges)
    # Ranges at most 16 KiB apart are read by one request.
    assert len(server.ranges) <= len(PHOTOS) and num_bytes <= 2 * HEAD * len(PHOTOS)


@pytest.mark.parametrize("name", REMOTE)
def test_a_failing_server_raises(name, server):
    pytest.importorskip("obstore")
    source = remote_sources(server)[name]()
    source.identity()
    server.fault = lambda path, start, end, count: "503"
    with pytest.raises(TimeoutError):
        sizes_of(source)
    server.fault = None
    assert sizes_of(remote_sources(server)[name]()) == expected(ALL)


def test_servers_without_ranges_send_whole_files(server):
    pytest.importorskip("obstore")
    source = remote_sources(server)["Files over HTTP"]()
    server.fault = lambda path, start, end, count: "norange"
    assert sizes_of(source) == expected(ALL)


def test_heads_are_not_stored_in_the_local_cache(server, tmp_path):
    pytest.importorskip("obstore")
    for name in ("Tar", "Files"):
        source = remote_sources(server, cache=tmp_path / name)[name]()
        source.identity()
        before = stored_bytes(tmp_path / name)
        sizes_in_heads(source, np.arange(len(PHOTOS)), "data")
        assert stored_bytes(tmp_path / name) == before


def stored_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


COUNT = 200


@pytest.mark.parametrize("name", ("Tar", "TFRecord", "Files"))
@pytest.mark.parametrize("wrap", (False, True))
def test_sizes_are_read_again_if_one_image_changes(name, wrap, tmp_path):
    images = [encoded("BMP", k, shape=(20, 24)) for k in range(COUNT)]

    def opened():
        source = MAKERS[name](tmp_path, images)
        for path in (path for path in tmp_path.rglob("*") if path.is_file()):
            os.utime(path, (1e9, 1e9))  # a program may preserve the time
        again = {
            "Tar": lambda: sources.Tar(str(tmp_path / "a.tar"), FIELDS),
            "TFRecord": lambda: sources.TFRecord(str(tmp_path / "a.tfrecord"), FEATURES),
        }
        source = again.get(name, lambda: source)()
        return sources.Mixture([(sources.Named(source, "name"), 1)]) if wrap else source

    source = opened()
    assert sizes_of(source) == [(20, 24)] * COUNT
    number = next(k for k in range(100, COUNT) if k not in spread(COUNT, 64))
    images[number] = encoded("BMP", number, shape=(24, 20))  # as many bytes
    changed = opened()
    assert changed.identity() == source.identity()  # which does not suffice
    assert sizes_of(changed) == expected(images)


@pytest.mark.parametrize("name", REMOTE)
def test_sizes_of_remote_images_are_stored(name, server, tmp_path):
    pytest.importorskip("obstore")
    folder = tmp_path / "sizes"

    def check(num_stored, **options):
        source = remote_sources(server, **options)[name]()
        assert sizes_of(source, cache_dir=folder) == expected(ALL)
        assert len([*folder.iterdir()] if folder.exists() else []) == num_stored

    if name == "Files over HTTP":  # changes are not detected
        check(0)
        check(1, identity="photographs")
        check(1, identity="photographs")
        check(2, identity="other photographs")
        return
    check(1)
    check(1)
    server.tag = '"another version"'
    check(2)


def test_maps_of_other_fields_keep_the_stored_sizes(tmp_path):
    source = tar(tmp_path, ALL)
    folder = tmp_path / "sizes"
    for field, num_stored in (("data", 0), ("label", 1)):
        mapped = source.map(lambda record: record, inputs=[field])
        assert sizes_of(mapped, cache_dir=folder) == expected(ALL)
        assert len([*folder.iterdir()] if folder.exists() else []) == num_stored


def test_a_record_without_identity_has_no_stored_size(tmp_path):
    paths = written_files(tmp_path / "files", PHOTOS)
    source = sources.Files(paths=paths)
    os.unlink(paths[0])
    folder = tmp_path / "sizes"
    assert sizes_of(source, cache_dir=folder) == [(1, 1), *expected(PHOTOS)[1:]]
    assert not folder.exists()


def test_heads_of_images_that_are_read_whole_are_not_read(server):
    pytest.importorskip("obstore")
    images = [encoded("PNG", k, shape=(80, 100)) for k in range(COUNT)]
    assert min(map(len, images)) > HEAD
    written_files(server.folder / "bucket" / "png", images)
    source = sources.Files("s3://bucket/png", storage_options=server.options)
    source.identity()
    server.ranges.clear()
    assert sizes_of(source) == [(80, 100)] * COUNT
    assert len(server.ranges) <= COUNT + 64
