"""Files of folders and lists, compared with DALI's reader."""

import os
import pathlib
import pickle
import shutil
import socket

import grain
import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def
from PIL import Image

import dalijax
from dalijax import data_iterator
from dalijax.adapters.grain import DALITransform
from dalijax.errors import BatchError
from dalijax.sources import Files, Records

NAMES = [
    "b/2.jpg",
    "b/10.jpg",
    "b/1.PNG",
    "a/x.jpg",
    "a/.hid.jpg",
    "c.d/z.jpeg",
    "é/ü.jpg",
    "B/y.jpg",
]


@pytest.fixture
def classes(tmp_path):
    root = tmp_path / "root"
    for number, name in enumerate([*NAMES, "a/note.txt", "readme.md"]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"%d" % number)
    (root / "empty").mkdir()  # DALI counts it as a class, too
    (root / "a" / "folder.jpg").mkdir()
    os.symlink("../b/2.jpg", root / "a" / "link.jpg")
    os.symlink("b", root / "linked")
    return root


def listed_by_dali(root):
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph():
        data, label = fn.readers.file(file_root=str(root), name="reader")
        return fn.get_property(data, key="source_info"), label

    pipeline = graph()
    pipeline.build()
    for _ in range(pipeline.reader_meta("reader")["epoch_size"]):
        path, label = pipeline.run()
        yield np.array(path[0]).tobytes().decode(), int(np.array(label[0])[0])


def paths_of(source):
    read = source.read(np.arange(len(source)), ["data"])["data"]
    return [path.tobytes().decode() for path in read]


def test_class_folders_are_listed_as_by_dali(classes):
    source = Files(classes)
    labels = source.read(np.arange(len(source)), ["label"])["label"]
    relative = [os.path.relpath(path, classes) for path in paths_of(source)]
    assert list(zip(relative, labels.tolist())) == list(listed_by_dali(classes))
    assert labels.dtype == np.int32 and labels[0].shape == ()
    assert source.classes == ("B", "a", "b", "c.d", "empty", "linked", "é")
    assert source.fields["data"].is_path and source.fields["label"].dtype == np.int32
    assert source.name(0) == str(classes / "B/y.jpg")


def test_files_of_deeper_folders_are_of_their_class(classes):
    for name in (
        "b/deep/3.jpg",
        "b/deep/er/4.jpg",
        "a/folder.jpg/5.jpg",
        "a/folder.jpg/no.txt",
        "b/.hidden/6.jpg",
    ):
        (classes / name).parent.mkdir(parents=True, exist_ok=True)
        (classes / name).write_bytes(b"x")
    source = Files(classes)
    labels = source.read(np.arange(len(source)), ["label"])["label"]
    found = [
        (str(pathlib.Path(root, name)), classname)
        for classname in source.classes
        for root, _, names in os.walk(classes / classname, followlinks=True)
        for name in names
        if "/.hidden" not in root
        if name.lower().endswith((".jpg", ".jpeg", ".png"))
    ]
    named = [source.classes[label] for label in labels]
    assert sorted(zip(paths_of(source), named)) == sorted(found)
    assert [path for path in paths_of(source) if "/b/" in path] == [
        str(classes / "b" / name)
        for name in ("1.PNG", "10.jpg", "2.jpg", "deep/3.jpg", "deep/er/4.jpg")
    ]
    os.symlink("..", classes / "b" / "deep" / "up")
    with pytest.raises(ValueError, match=r"deep/up/ is a link to .*/b, which contains it"):
        Files(classes)
    os.unlink(classes / "b" / "deep" / "up")
    os.symlink("../c.d", classes / "b" / "other")
    os.symlink("../b", classes / "c.d" / "other")
    with pytest.raises(ValueError, match=r"other/other/ is a link to .*, which contains it"):
        Files(classes)


@pytest.mark.parametrize("remote", (False, True), ids=("local", "remote"))
def test_hidden_folders_are_not_classes_and_empty_folders_are_named(remote, tmp_path, caplog):
    names = ("cat/1.jpg", "dog/1.jpg", ".ipynb_checkpoints/1.jpg", "cat/.ipynb_checkpoints/1.jpg")
    names += ("__MACOSX/cat/._1.jpg", "dog/__MACOSX/._1.jpg")
    for name in (*names, "bird/note.txt", ".git/config", "cat/deep/2.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    pytest.importorskip("fsspec")
    source = Files(f"file://{tmp_path}" if remote else tmp_path)
    assert source.classes == ("bird", "cat", "dog")
    assert list(source.read(np.arange(3), ["label"])["label"]) == [1, 1, 2]
    (record,) = caplog.records
    assert "the class directories 'bird' have no files ending in .jpg" in record.getMessage()
    caplog.clear()
    flat = Files(f"file://{tmp_path}/cat/deep" if remote else tmp_path / "cat/deep")
    (tmp_path / "cat/deep/.hidden").mkdir()
    assert len(flat) == 1 and flat.classes == () and not caplog.records


def test_special_files_are_left_out_with_a_warning(tmp_path, caplog):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.jpg").write_bytes(b"x")
    os.mkfifo(tmp_path / "a/2.jpg")
    os.symlink("3.jpg", tmp_path / "a/3.jpg")
    os.symlink("2.jpg", tmp_path / "a/4.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        monkey = os.getcwd()
        os.chdir(tmp_path / "a")  # the path of a socket is short
        server.bind("5.jpg")
        os.chdir(monkey)
    os.symlink("/dev/zero", tmp_path / "a/6.jpg")
    os.mkfifo(tmp_path / "a/fifo")
    os.symlink("loop", tmp_path / "loop")
    source = Files(tmp_path)
    assert [os.path.basename(path) for path in paths_of(source)] == ["1.jpg"]
    root, folder = (record.getMessage() for record in caplog.records)
    assert "skipped 'loop'" in root  # it may have been a class folder
    assert "skipped '2.jpg', '3.jpg', '4.jpg' and 2 more" in folder
    for name in ("2", "3", "5", "6"):
        with pytest.raises(FileNotFoundError, match=rf"paths\[0\] .*{name}\.jpg$"):
            Files(paths=[tmp_path / f"a/{name}.jpg"])


@pytest.mark.parametrize("listed", (False, True), ids=("encoded paths", "a list"))
def test_a_fifo_among_paths_is_a_bad_record(listed, tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    paths = [str(tmp_path / f"{k}.png") for k in (0, 1)]
    if listed:  # of long lists, only some files are checked
        monkeypatch.setattr("dalijax.core.sources.files._MOST_CHECKED", 1)
        os.mkfifo(tmp_path / "1.png")
        source = Files(paths=paths, identity="x")
    else:
        os.mkfifo(tmp_path / "1.png")
        source = Records([{"data": os.fsencode(path)} for path in paths])

    @data_iterator(output_map=["x"], mask="mask", on_error="mask", as_numpy=True)
    def read(data):
        encoded = data if listed else dalijax.fn.read_file(data)
        return fn.decoders.image(encoded, device="cpu")

    with read(source=source, batch_size=2, shuffle=False) as iterator:
        assert list(next(iterator)["mask"]) == [True, False]
        assert "it is a FIFO, a socket or a device" in iterator.errors[0].message
    if listed:
        assert Files(paths=paths).identity()  # a digest of the records does not wait for it


def test_a_fifo_that_read_file_reads_for_another_operator_is_a_bad_record(tmp_path):
    os.mkfifo(tmp_path / "1.npy")
    (tmp_path / "0.npy").write_bytes(b"ab")
    records = [{"path": os.fsencode(tmp_path / f"{number}.npy")} for number in (0, 1)]

    def read(path):
        return dalijax.fn.read_file(path)

    make = data_iterator(read, ["x"], mask="mask", on_error="mask", as_numpy=True)
    with make(source=Records(records), batch_size=2, shuffle=False) as iterator:
        assert list(next(iterator)["mask"]) == [True, False]
        assert "it is a FIFO, a socket or a device" in iterator.errors[0].message
    transform = DALITransform(read, output_map=["x"], batch_size=2, on_error="mask", pad="mask")
    batch = next(iter(grain.MapDataset.source(records).seed(1).pipe(transform)))
    assert np.asarray(batch["mask"]).tolist() == [True, False]


@pytest.mark.parametrize("policy", ("raise", "mask", "skip"))
def test_an_unreadable_file_of_any_name_is_a_bad_record(policy, tmp_path):
    for k in range(4):
        np.save(tmp_path / f"{k}.npy", np.full(3, k))
    os.rename(tmp_path / "3.npy", os.fsencode(tmp_path) + b"/3\xfe.npy")  # it is good
    os.symlink(b"/nowhere", os.fsencode(tmp_path) + b"/2\xff.npy")
    source = Files(tmp_path, extensions=["npy"], identity="x")
    (bad,) = [k for k in range(5) if "\udcff" in source.name(k)]
    graph = data_iterator(lambda data: fn.decoders.numpy(data), ["x"], mask="mask", on_error=policy)
    iterator = graph(source=source, batch_size=2, shuffle=False, as_numpy=True)
    name = os.fsdecode(os.fsencode(tmp_path) + b"/2\xff.npy")
    next(iterator)
    if policy == "raise":
        with pytest.raises(BatchError, match=r"2\\xff.npy can't be decoded") as error:
            next(iterator)
        assert error.value.files == (name,)
    batches = list(iterator)
    if policy == "mask":
        assert np.flatnonzero(~batches[0]["mask"]).tolist() == [bad - 2]
    if policy != "raise":
        assert iterator.errors[0].files == (name,)
    assert batches[-1]["x"][0, 0] == 3 and len(batches) == 1 + (policy == "mask")


def test_records_are_read_in_the_order_of_the_indices_and_may_come_twice(classes):
    source = Files(classes)
    whole = paths_of(source)
    values = source.read(np.array([3, 0, 3]), ["data", "label"])
    assert [v.tobytes().decode() for v in values["data"]] == [whole[3], whole[0], whole[3]]
    assert set(source.read(np.array([1]), ["data"])) == {"data"}


def test_a_flat_folder_and_other_extensions(tmp_path):
    for name in ("2.npy", "1.npy", "x.jpg"):
        (tmp_path / name).write_bytes(b"1")
    assert [os.path.basename(p) for p in paths_of(Files(tmp_path))] == ["x.jpg"]
    npy = Files(tmp_path, extensions=["npy"])
    assert [os.path.basename(p) for p in paths_of(npy)] == ["1.npy", "2.npy"]
    assert len(Files(tmp_path, extensions=[])) == 3
    assert set(npy.fields) == {"data"} and npy.classes == ()
    with pytest.raises(TypeError, match=r"\['npy'\]"):
        Files(tmp_path, extensions="npy")


def test_a_list_keeps_its_order_and_labels(classes):
    paths = [classes / name for name in reversed(NAMES)]
    source = Files(paths=paths, labels=range(len(paths)))
    assert paths_of(source) == [str(path) for path in paths]
    assert list(source.read(np.arange(3), ["label"])["label"]) == [0, 1, 2]
    assert set(Files(paths=paths).fields) == {"data"}
    assert paths_of(Files(paths=paths[:1])) == [str(paths[0])]


def test_relative_paths_outlive_a_change_of_the_folder(classes, monkeypatch):
    monkeypatch.chdir(classes)
    sources = Files("."), Files(paths=[NAMES[0]])
    monkeypatch.chdir("/")
    for source in sources:
        assert all(os.path.isfile(path) for path in paths_of(source))


def test_paths_that_cannot_be_listed_are_named(classes, tmp_path):
    with pytest.raises(FileNotFoundError, match=r": '/.*/nowhere/'$"):
        Files(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match=r"/x\.jpg is a file, but Files takes a directory"):
        Files(classes / "a/x.jpg")
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"void.* has neither class directories nor files.*\.jpg"):
        Files(tmp_path / "void")
    (tmp_path / "void" / "class").mkdir()
    with pytest.raises(ValueError, match="1 class directories of .*void"):
        Files(tmp_path / "void")
    (classes / "top.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"'B', 'a', 'b' and 4 more\) and other files.*'top\.jpg'"):
        Files(classes)
    with pytest.raises(FileNotFoundError, match=r"paths\[1\] does not exist: .*gone\.jpg"):
        Files(paths=[classes / NAMES[0], classes / "gone.jpg"])
    with pytest.raises(FileNotFoundError, match=r"paths\[0\] is not a file: .*/a$"):
        Files(paths=[classes / "a"])
    with pytest.raises(ValueError, match="paths is empty"):
        Files(paths=[])
    with pytest.raises(TypeError, match="is a directory. Pass it as"):
        Files(paths=str(classes))
    with pytest.raises(TypeError, match="a directory, or paths="):
        Files()
    with pytest.raises(TypeError, match="labels= requires paths="):
        Files(classes, labels=[1])
    for labels, words in (
        ([1, 2], r"1 paths, but labels of shape \(2,\)"),
        ([1 << 40], "32 bits"),
    ):
        with pytest.raises(ValueError, match=words):
            Files(paths=[classes / NAMES[0]], labels=labels)


def test_the_identity_depends_on_the_content_and_not_on_the_place(classes, tmp_path):
    identity = Files(classes).identity()
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(classes, copy, symlinks=True)
    assert Files(copy).identity() == identity
    paths = [os.path.join(copy, name) for name in NAMES]
    by_list = Files(paths=paths, labels=range(8)).identity()
    assert by_list == Files(paths=[classes / n for n in NAMES], labels=range(8)).identity()
    assert by_list != Files(paths=paths, labels=[0] * 8).identity()
    assert by_list != Files(paths=paths[::-1], labels=range(8)).identity()
    (copy / NAMES[3]).write_bytes(b"x")  # still as long
    assert Files(copy).identity() != identity
    assert Files(copy, identity="mine").identity() == "mine"


def test_a_source_pickles(classes):
    source = pickle.loads(pickle.dumps(Files(classes)))
    assert paths_of(source) == paths_of(Files(classes))
    assert source.identity() == Files(classes).identity()


def test_many_names_take_little_memory():
    from dalijax.core.formats.names import Names

    names = [b"%07d.jpg" % i for i in range(10_000)]
    table = Names([(b"", names[:1]), (b"a/", []), (b"b/", names[1:])])
    assert [table[i] for i in range(len(table))] == names[:1] + [b"b/" + n for n in names[1:]]
    assert len(table.data) + table.ends.nbytes == 10_000 * (13 + 8) - 2


def test_links_without_a_target_next_to_class_folders_are_reported(tmp_path, caplog):
    for name in ("a/1.jpg", "c/2.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "b").symlink_to("unmounted")
    (tmp_path / "a" / "deep").symlink_to("unmounted")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a" / "gone.jpg").symlink_to("unmounted.jpg")
    source = Files(tmp_path)
    assert source.classes == ("a", "c") and len(source) == 3
    assert "skipped 'b', 'loop', because the targets of these links do not exist" in caplog.text
    assert "skipped 'deep'" in caplog.text and "gone.jpg" not in caplog.text
