"""Path arguments of readers are compared by their content, in any folder."""

import io
import json
import os
import pathlib
import shutil
import struct
import tarfile

import numpy as np
import pytest
from nvidia.dali import backend, fn, tfrecord, types

from dalijax import data_iterator
from dalijax.core.state import reader_files
from dalijax.core.state.reader_files import PATHS, READERS, described, reader_of

SAMPLES = 8


def dali_readers():
    """Returns each DALI reader, as users write it, with its schema."""
    modules = {"": fn, "readers.": fn.readers, "experimental.readers.": fn.experimental.readers}
    for prefix, module in modules.items():
        for name, function in vars(module).items():
            schema = getattr(function, "_schema_name", None)
            if schema and "reader" in f"{prefix}{name}":
                yield prefix + name, {"readers__TFRecord": "readers___TFRecord"}.get(schema, schema)


# Arguments that are text but not paths.
VALUES = {
    *("dir_filters", "enable_frame_num", "ext", "feature_names", "file_filter", "file_filters"),
    *("file_list_format", "file_list_rounding", "images", "missing_component_behavior", "mode"),
    *("out_of_bounds_policy", "pad_mode"),
}


def texts_of_readers():
    """Yields the reader and the name of each text argument of DALI's readers."""
    for kind, schema in dali_readers():
        own = backend.GetSchema(backend.GetSchema(schema).DeprecatedInFavorOf() or schema)
        for name in own.GetArgumentNames():
            if "STRING" in str(own.GetArgumentType(name)) and not name.startswith("_"):
                yield reader_of(kind), name


def test_every_path_of_every_reader_that_dali_has_is_known():
    seen = {*texts_of_readers()}
    assert {reader for reader, _ in seen} == READERS
    assert {name for _, name in seen} == PATHS | reader_files.IGNORED | VALUES
    assert not (PATHS | reader_files.IGNORED) & VALUES
    # Every registered reader is reachable through a function of DALI, or is TFRecord.
    registered = {*backend.RegisteredCPUOps(), *backend.RegisteredGPUOps()}
    registered |= {*backend.RegisteredMixedOps()}
    schemas = {schema for _, schema in dali_readers()} | {"readers___TFRecord", "_TFRecordReader"}
    assert {name for name in registered if "eader" in name} <= schemas


def test_other_operators_are_not_readers():
    kinds = ("resize", "readers", "external_source", "experimental.inputs.video", "io.file.read")
    assert [reader_of(kind) for kind in kinds] == [""] * len(kinds)
    assert reader_of("video_reader_resize") == "video_resize"


def write(root, names, content=b"%d"):
    for i, name in enumerate(names):
        path = pathlib.Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content % i if b"%d" in content else content)


def argument(root, reader, name, how):
    """Returns a reader's arguments over new data in a folder, and the file to change."""
    root = pathlib.Path(root)
    files = [f"class{i % 2}/{i}.{'npy' if reader == 'numpy' else 'jpg'}" for i in range(SAMPLES)]
    if reader == "fits":
        files = [file.replace("jpg", "fits") for file in files]
    if how == "files":
        write(root, files)
        given = str(root) if name == "file_root" else [str(root / file) for file in files]
        return {name: given}, root / files[-1]
    if how == "archive":
        write(root, ["a", "b"], bytes(range(256)) * 2000)
        if reader.startswith("caffe"):
            write(root, ["lock.mdb"])
            return {name: [str(root)]}, root / "b"
        return {name: [str(root / "a"), str(root / "b")]}, root / "b"
    write(root, files)
    if reader == "nemo_asr":
        lines = [json.dumps({"audio_filepath": str(root / f), "duration": 1.0}) for f in files]
    else:
        lines = [f"{root / file} {i}" for i, file in enumerate(files)]
    listed = reader in ("file", "numpy", "fits", "nemo_asr") or reader.startswith("video")
    if not listed:  # an index or annotations, which name no file by its path
        lines = [str(i) for i in range(SAMPLES)]
    (root / "list").mkdir()
    path = root / "list" / "list.txt"
    path.write_text("\n".join(lines))
    folder = name == "preprocessed_annotations"
    return {name: [str(path)] if name.endswith("s") else str(path.parent if folder else path)}, path


_ARCHIVES = {"path", "paths"}
_FILES = {"file_root", "filenames", "files"}
ARGUMENTS = sorted(
    (reader, name, "archive" if name in _ARCHIVES else "files" if name in _FILES else "list")
    for reader, name in {*texts_of_readers()}
    if name in PATHS
)


@pytest.mark.parametrize("reader,name,how", ARGUMENTS, ids=lambda x: str(x))
def test_each_argument_is_equal_for_a_copy_and_differs_after_a_change(tmp_path, reader, name, how):
    before = described(reader, argument(tmp_path / "one", reader, name, how)[0])
    elsewhere = tmp_path / "far" / "from" / "there"
    arguments, changed = argument(elsewhere, reader, name, how)
    assert set(before) == {name}
    assert described(reader, arguments) == before
    os.utime(changed, (1, 1))  # times are not compared
    assert described(reader, arguments) == before
    data = changed.read_bytes()
    if how == "list":
        lines = data.splitlines()
        changed.write_bytes(b"\n".join(lines[::-1]))  # the same size
    elif how == "archive":
        changed.write_bytes(
            data[:70_000] + b"?" + data[70_001:]
            if len(data) < 70_000
            else data[:100] + b"?" + data[101:]
        )
    else:
        changed.write_bytes(data + b"more")
        os.utime(changed.parent)  # another process would detect it in any case
    assert described(reader, arguments) != before


def test_names_are_compared_below_the_common_root(tmp_path, monkeypatch):
    write(tmp_path, ["a/1.jpg", "b/2.jpg"])
    monkeypatch.chdir(tmp_path / "a")
    absolute = [str(tmp_path / "a/1.jpg"), str(tmp_path / "b/2.jpg")]
    alike = [["1.jpg", "../b/2.jpg"], absolute, [f"{tmp_path}/a/../a/1.jpg", absolute[1]]]
    assert len({described("file", {"files": own})["files"] for own in alike}) == 1
    below = described("file", {"files": ["a/1.jpg", "b/2.jpg"], "file_root": str(tmp_path)})
    assert below == {"files": described("file", {"files": absolute})["files"], "file_root": ""}
    assert described("file", {"files": absolute[::-1]}) != described("file", {"files": absolute})
    roots = [str(tmp_path), "..", f"{tmp_path}/a/.."]
    assert len({described("file", {"file_root": root})["file_root"] for root in roots}) == 1


def test_files_that_a_reader_ignores_are_not_compared(tmp_path):
    write(tmp_path, ["a/1.jpg", "b/2.jpg"])
    before = described("file", {"file_root": str(tmp_path)})
    write(tmp_path, ["a/README.md", ".DS_Store"])
    assert described("file", {"file_root": str(tmp_path)}) == before
    write(tmp_path, ["a/3.JPEG"])
    assert described("file", {"file_root": str(tmp_path)}) != before


def test_missing_files_are_compared_by_name(tmp_path):
    for reader, name, _ in ARGUMENTS:
        one, other = (described(reader, {name: [f"{tmp_path}/{x}/no"]})[name] for x in "ab")
        assert "not read" in one and one == other
    one, other = (described("webdataset", {"paths": f"s3://bucket/{x}.tar"}) for x in "ab")
    assert one != other


def test_of_very_many_files_some_sizes_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_files, "_MOST_SIZES", 3)
    monkeypatch.setattr(reader_files, "_MOST_CONTENTS", 3)
    write(tmp_path, [f"{i}.jpg" for i in range(6)])
    files = [str(tmp_path / f"{i}.jpg") for i in range(6)]
    before = described("file", {"files": files})["files"]
    assert "6 files, 3 bytes in 3 of them" in before
    assert described("file", {"files": [*files[:5], files[0]]})["files"] != before


def test_of_equal_names_and_sizes_contents_are_compared(tmp_path):
    write(tmp_path, [f"{i}.jpg" for i in range(6)], b"%d" + bytes(100))
    files = [str(tmp_path / f"{i}.jpg") for i in range(6)]
    before = [described("file", given) for given in ({"files": files}, {"file_root": tmp_path})]
    pathlib.Path(files[3]).write_bytes(b"x" + bytes(100))
    after = [described("file", given) for given in ({"files": files}, {"file_root": tmp_path})]
    assert all(a != b for a, b in zip(after, before))


def test_a_list_is_equal_only_below_its_own_root(tmp_path):
    """A list of training files differs from a list of as many evaluation files."""
    write(tmp_path, [f"{part}/{i}.jpg" for part in ("train", "val") for i in range(6)])
    texts = []
    for part in ("train", "val"):
        path = tmp_path / f"{part}.txt"
        path.write_text("\n".join(f"{tmp_path}/{part}/{i}.jpg {i}" for i in range(6)))
        texts.append(described("file", {"file_list": str(path)}))
    assert texts[0] != texts[1]


# End to end


def rest(iterator):
    return [np.asarray(next(iterator)["x"]).ravel().tolist() for _ in range(2)]


def check(make, change, words, copies=()):
    """Checks that a state is accepted over copies, and refused after a change."""
    iterator = make()
    next(iterator)
    state, want = iterator.get_state(), None
    want = rest(iterator)
    for other in (make, *copies):
        fresh = other()
        fresh.set_state(state)
        assert rest(fresh) == want
    change()
    fresh = make()
    with pytest.raises(ValueError, match=f"(?s)saved -> now.*{words}"):
        fresh.set_state(state)


@pytest.fixture
def folder(tmp_path):
    """Six files in two folders, a list of them, and a copy of everything in another place."""
    root = tmp_path / "one"
    files = [f"class{i % 2}/{i}.jpg" for i in range(SAMPLES)]
    write(root, files)
    (root / "list.txt").write_text("\n".join(f"{file} {i}" for i, file in enumerate(files)))
    shutil.copytree(root, tmp_path / "deeper" / "two")
    return root, tmp_path / "deeper" / "two"


def by(**reader):
    @data_iterator(output_map=["x"], reader_name="reader")
    def graph():
        return fn.readers.file(name="reader", random_shuffle=True, **reader)[1]

    return graph(batch_size=2)


def test_a_list_that_was_reshuffled_is_refused(folder):
    root, other = folder

    def reshuffle():
        path = root / "list.txt"
        lines = path.read_text().splitlines()
        path.write_text("\n".join(lines[::-1]))

    copies = [lambda: by(file_list=str(other / "list.txt"))]
    check(lambda: by(file_list=str(root / "list.txt")), reshuffle, "reader.file_list", copies)


def test_a_list_of_absolute_names_under_another_root_is_the_same(folder):
    for root in folder:
        path = root / "list.txt"
        lines = path.read_text().splitlines()
        path.write_text("\n".join(f"{root}/{line}" for line in lines))
    saved = by(file_list=str(folder[0] / "list.txt")).get_state()
    by(file_list=str(folder[1] / "list.txt")).set_state(saved)


def test_a_folder_under_another_name_is_the_same_and_another_size_is_not(folder, monkeypatch):
    root, other = folder
    monkeypatch.chdir(root)
    copies = [lambda: by(file_root=str(other)), lambda: by(file_root="../one")]
    check(
        lambda: by(file_root=str(root)),
        lambda: [(root / "class1/1.jpg").write_bytes(b"longer"), os.utime(root / "class1")],
        "reader.file_root",
        copies,
    )


def test_files_under_another_root_are_the_same(folder):
    def files(root):
        return lambda: by(files=sorted(map(str, root.glob("*/*.jpg"))))

    check(files(folder[0]), (folder[0] / "class1/7.jpg").unlink, "reader.files", [files(folder[1])])


def test_a_tfrecord_index_is_compared_by_its_content(tmp_path):
    def record(value):
        feature = _field(1, _field(1, b"x") + _field(2, _field(3, _field(1, bytes([value])))))
        example = _field(1, feature)
        return struct.pack("<QI", len(example), 0) + example + struct.pack("<I", 0)

    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
        records = [record(i) for i in range(SAMPLES)]
        (root / "data").write_bytes(b"".join(records))
        size = len(records[0])
        lines = [f"{size * i} {size}" for i in range(SAMPLES)]
        (root / "index").write_text("\n".join(lines))

    def make(root):
        @data_iterator(output_map=["x"], reader_name="reader")
        def graph():
            x = fn.readers.tfrecord(
                path=str(root / "data"),
                index_path=str(root / "index"),
                features={"x": tfrecord.FixedLenFeature((), tfrecord.int64, 0)},
                name="reader",
            )["x"]
            return fn.cast(x, dtype=types.INT32)

        return lambda: graph(batch_size=2)

    index = roots[0] / "index"
    lines = index.read_text().splitlines()
    check(
        make(roots[0]),
        lambda: index.write_text("\n".join(lines[::-1])),
        "reader.index_path",
        [make(roots[1])],
    )


def _field(number, content):
    return bytes([number << 3 | 2, len(content)]) + content


def test_archives_of_webdataset_are_compared_by_samples_of_their_content(tmp_path):
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
        for shard in "ab":
            with tarfile.open(root / f"{shard}.tar", "w") as tar:
                for i in range(4):
                    info = tarfile.TarInfo(f"{shard}{i}.cls")
                    info.size = 1
                    tar.addfile(info, io.BytesIO(bytes([i + 4 * (shard == "b")])))

    def make(root):
        @data_iterator(output_map=["x"], reader_name="reader")
        def graph():
            paths = [str(root / "a.tar"), str(root / "b.tar")]
            return fn.readers.webdataset(
                paths=paths, ext=["cls"], dtypes=[types.UINT8], name="reader"
            )

        return lambda: graph(batch_size=2)

    swap = roots[0] / "a.tar"
    check(
        make(roots[0]),
        lambda: shutil.copy(roots[0] / "b.tar", swap),
        "reader.paths",
        [make(roots[1])],
    )


def test_readers_next_to_python_functions_are_compared_equally(folder):
    def make(root):
        @data_iterator(output_map=["x"], reader_name="reader")
        def graph():
            x = fn.readers.file(file_list=str(root / "list.txt"), name="reader")[1]
            return fn.python_function(x, function=lambda own: own)

        return lambda: graph(batch_size=2)

    path = folder[0] / "list.txt"
    lines = path.read_text().splitlines()
    check(
        make(folder[0]),
        lambda: path.write_text("\n".join(lines[::-1])),
        "reader.file_list",
        [make(folder[1])],
    )
