"""Rows of Parquet files, compared with the tables that pyarrow reads."""

import io
import pickle
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer
from nvidia.dali import fn
from shardings import rows_over

from dalijax import data_iterator
from dalijax.core.order.shuffle import shuffled
from dalijax.core.random.hashing import fold
from dalijax.core.sources.source import order_of, read_ahead_of
from dalijax.errors import StateError
from dalijax.sources import Field, Mixture, Named, Parquet, Selection
from range_server import serving, share_of_requests

COUNTS = [(5, 0, 7), (), (1, 6, 6, 4), (9,)]  # rows of the row groups of each file
COUNT = sum(map(sum, COUNTS))
FIELDS = {"data": "image/bytes", "label": "label", "boxes": "boxes", "text": "text"}
SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        "label": pa.int64(),
        "boxes": pa.list_(pa.list_(pa.float32(), 4)),
        "other": pa.float64(),
    }
)


def rows():
    """Returns the rows of all files; the size of the bytes of row k is 100 + 10 * k."""
    rng = np.random.default_rng(0)
    return [
        {
            "text": f"text {k}",
            "image": {"bytes": rng.bytes(100 + 10 * k), "path": None},
            "label": k,
            "boxes": rng.random((k % 3, 4), np.float32).tolist(),
            "other": k / 2,
        }
        for k in range(COUNT)
    ]


@pytest.fixture
def folder(tmp_path):
    """A folder with the files 0.parquet to 3.parquet, with several row groups of several sizes."""
    table, start = pa.Table.from_pylist(rows(), SCHEMA), 0
    options = {"compression": "zstd", "write_page_checksum": True, "write_page_index": True}
    for number, counts in enumerate(COUNTS):
        path = tmp_path / f"{number}.parquet"
        with pq.ParquetWriter(path, SCHEMA, use_dictionary=["text"], **options) as writer:
            for count in counts:
                writer.write_table(table.slice(start, count), row_group_size=max(1, count))
                start += count
    return tmp_path


def parquet(folder, **options):
    return Parquet(f"{folder}/{{0..3}}.parquet", **{"fields": FIELDS, "window": 2500, **options})


def check(source, indices):
    """Compares records with the rows that pyarrow reads."""
    table, columns = rows(), source.read(indices, list(FIELDS))
    for row, index in enumerate(indices.tolist()):
        assert columns["data"][row].tobytes() == table[index]["image"]["bytes"]
        assert columns["label"][row] == table[index]["label"]
        assert columns["text"][row] == table[index]["text"]
        boxes = np.array(table[index]["boxes"], np.float32).reshape(-1, 4)
        np.testing.assert_array_equal(columns["boxes"][row], boxes, strict=True)


def test_records_are_the_rows_of_all_files(folder):
    assert pq.read_table(folder, schema=SCHEMA).to_pylist() == rows()
    source = parquet(folder)
    assert len(source) == COUNT and "38 records in 8 row groups" in repr(source)
    assert source.fields["data"] == Field(np.dtype(np.uint8), 1)
    assert source.fields["boxes"] == Field(np.dtype(np.float32), 2)
    rng = np.random.default_rng(1)
    for indices in (np.arange(COUNT), rng.integers(0, COUNT, 50), np.array([12, 12, 0])):
        check(source, indices)
    again = pickle.loads(pickle.dumps(source))
    check(again, rng.permutation(COUNT))
    assert again.identity() == source.identity()
    assert source.read(np.array([3]), []) == {}


def test_all_columns_are_the_fields_by_default(folder):
    source = Parquet(folder / "3.parquet")
    assert set(source.fields) == set(SCHEMA.names)
    values = source.read(np.array([2]), [*SCHEMA.names])
    assert values["image"][0] == rows()[COUNT - 7]["image"]
    assert source.name(2) == f"{folder}/3.parquet: row 2"


def test_names_are_those_of_rows_in_files(folder):
    source = parquet(folder)
    places = [(file, k) for file, counts in enumerate(COUNTS) for k in range(sum(counts))]
    names = [f"{folder}/{file}.parquet: row {k}" for file, k in places]
    assert [source.name(k) for k in range(COUNT)] == names
    named = Named(source, "name")
    assert list(named.read(np.array([30, 6]), ["name"])["name"]) == [names[30], names[6]]


def order_by_hand(groups, seed, epoch):
    """Returns the records of an epoch: the groups in order, window by window."""
    order = shuffled(range(len(groups.sizes)), len(groups.sizes), seed, epoch)
    windows, total = {}, 0
    for group in order.tolist():
        members = windows.setdefault(total // groups.window, [])
        members += range(groups.starts[group], groups.starts[group + 1])
        total += int(groups.sizes[group])
    records = []
    for number, members in enumerate(windows.values()):
        places = shuffled(range(len(members)), len(members), int(fold(seed, number)), epoch)
        records += [members[place] for place in places.tolist()]
    return records


@pytest.mark.parametrize("window", [1, 2500, "1MB"])
def test_an_epoch_shuffles_row_groups_and_the_rows_of_windows(folder, window):
    source = parquet(folder, window=window)
    order = order_of(source, 7, True)
    records, epochs = order(np.arange(4 * COUNT))
    np.testing.assert_array_equal(epochs, np.repeat(range(4), COUNT))
    by_epoch = records.reshape(4, COUNT)
    for epoch in range(4):
        assert by_epoch[epoch].tolist() == order_by_hand(source._groups, 7, epoch)
        assert sorted(by_epoch[epoch]) == list(range(COUNT))
    assert len({tuple(epoch) for epoch in by_epoch.tolist()}) == 4
    chosen = np.random.default_rng(1).integers(0, 4 * COUNT, 60)
    np.testing.assert_array_equal(order(chosen)[0], records[chosen])
    assert order_of(source, 8, True)(np.arange(COUNT))[0].tolist() != by_epoch[0].tolist()
    np.testing.assert_array_equal(
        order_of(source, 7, False)(np.arange(2 * COUNT))[0], [*range(COUNT)] * 2
    )


@pytest.mark.parametrize("parts, batch_size", [(2, 4), (3, 9), (4, 64)])
def test_parts_of_a_batch_read_parts_of_an_epoch(folder, parts, batch_size):
    source = parquet(folder, parts=parts, batch_size=batch_size)
    assert source._groups.window == 2500 // parts
    records, epochs = order_of(source, 7, True)(np.arange(3 * COUNT))
    np.testing.assert_array_equal(epochs, np.repeat(range(3), COUNT))
    for epoch in range(3):
        samples = np.arange(epoch * COUNT, (epoch + 1) * COUNT)
        part = samples % batch_size // (batch_size // parts)  # by the row in the stream's batches
        one_by_one = np.concatenate([records[samples[part == k]] for k in range(parts)])
        assert one_by_one.tolist() == order_by_hand(source._groups, 7, epoch)
    chosen = np.random.default_rng(1).integers(0, 3 * COUNT, 60)
    np.testing.assert_array_equal(order_of(source, 7, True)(chosen)[0], records[chosen])


def test_parts_must_divide_the_batch_size(folder):
    for batch_size in (None, 0, 6):
        with pytest.raises(ValueError, match="parts=4 requires the batch_size= of global batches"):
            parquet(folder, parts=4, batch_size=batch_size)


def test_mistakes_in_arguments_are_named(folder):
    with pytest.raises(ValueError, match="row 0 has no 'img/bytes'. It has \\['boxes', 'image'"):
        parquet(folder, fields={"data": "img/bytes"})
    with pytest.raises(ValueError, match="window must be a number of bytes"):
        parquet(folder, window="big")
    for window in (0, 1e30):
        with pytest.raises(ValueError, match="window must be from 1 byte to 1 EB, not"):
            parquet(folder, window=window)
    for batch_size in (-4, "4", 4.5):
        with pytest.raises((ValueError, TypeError), match="batch_size must be a global batch size"):
            parquet(folder, parts=2, batch_size=batch_size)
    with pytest.raises(TypeError, match=r"parts must be a whole number of parts, 1 or more"):
        parquet(folder, parts=1.5, batch_size=3)
    with pytest.raises(IsADirectoryError, match=r"/\*\.parquet"):
        Parquet(folder)


def test_a_selection_keeps_the_windows(folder):
    source = parquet(folder)
    kept = np.flatnonzero(np.arange(COUNT) % 4 == 1)
    selection = Selection(source, kept).map(lambda record: record, inputs=["label"])
    records = order_of(selection, 3, True)(np.arange(len(kept)))[0]
    assert sorted(records) == list(range(len(kept)))
    groups = source._groups.selected(kept)
    assert records.tolist() == order_by_hand(groups, 3, 0)
    assert {int(count) for count in np.diff(groups.starts)} >= {0, 1}
    check(source, kept[records])


@data_iterator(mask=True)
def graph(data, label):
    return {"data": fn.pad(data, shape=100 + 10 * COUNT), "label": label}


def values(batch):
    """Returns the label, the text and the bytes of each valid row."""
    columns = [np.asarray(batch[name]) for name in ("label", "text", "data", "mask")]
    return [
        (int(label), text, data[: 100 + 10 * int(label)].tobytes())
        for label, text, data, is_valid in zip(*columns, strict=True)
        if is_valid
    ]


def expected(records):
    table = rows()
    return [(k, table[k]["text"], table[k]["image"]["bytes"]) for k in records.tolist()]


def test_a_state_resumes_within_a_window_on_other_devices(folder):
    source = parquet(folder)
    records, _ = order_of(source, 5, True)(np.arange(2 * COUNT))
    iterator = graph(source=source, batch_size=6, seed=5, sharding=rows_over(2))
    assert [row for batch in iterator for row in values(batch)] == expected(records[:COUNT])
    iterator.seek(1, 3)
    state = iterator.get_state()
    resumed = graph(source=parquet(folder), batch_size=9, seed=5, sharding=rows_over(3))
    resumed.set_state(state)
    assert [row for batch in resumed for row in values(batch)] == expected(records[COUNT + 18 :])
    other = graph(source=parquet(folder, window=5000), batch_size=6, seed=5)
    with pytest.raises(StateError, match=r"windows of 2,500 bytes.* windows of 5,000 bytes"):
        other.set_state(state)
    other = graph(source=parquet(folder, parts=2, batch_size=6), batch_size=6, seed=5)
    with pytest.raises(StateError, match="windows of 1,250 bytes in 2 parts of 6 records"):
        other.set_state(state)


def test_a_given_identity_does_not_hide_other_row_groups(folder):
    source = parquet(folder, identity="ours")
    assert source.identity() == "ours"
    path = folder / "3.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=4)
    other = parquet(folder, identity="ours")
    check(other, np.arange(COUNT))
    state = graph(source=source, batch_size=6, seed=5).get_state()
    with pytest.raises(StateError, match="(?s)order: .* of the row groups .*can't ignore order"):
        graph(source=other, batch_size=6, seed=5).set_state(state, allow=["identity"])


@pytest.mark.parametrize("mixed", (False, True))
def test_a_state_needs_the_same_windows(folder, mixed):
    """In other windows, the same position would repeat and skip records."""

    def iterator(window):
        source = parquet(folder, window=window)
        source = Mixture([(source, 1)]) if mixed else source
        return graph(source=source, batch_size=6, seed=5)

    first = iterator("500MB")
    next(first)
    state = first.get_state()
    with pytest.raises(StateError, match="mixture.0.records" if mixed else "order: .* of the row"):
        iterator(500).set_state(state, allow=["identity", "identity.0"])
    iterator("500MB").set_state(state)


def test_a_mixture_keeps_the_windows_of_its_sources(folder):
    fields = {"data": "image/bytes", "label": "label"}
    sources = [parquet(folder, fields=fields), Parquet(folder / "3.parquet", fields, window=500)]
    mixture = Mixture([(sources[0], 3), (sources[1], 1)])
    records, epochs = order_of(mixture, 4, True)(np.arange(4 * COUNT))
    assert not epochs[(records < COUNT) & (epochs == 0)].any()
    first = records[(records < COUNT) & (epochs == 0)]
    assert first.tolist() == order_by_hand(sources[0]._groups, int(fold(4, 0)), 0)
    labels = np.asarray(mixture.read(records, ["label"])["label"])
    np.testing.assert_array_equal(labels, np.where(records < COUNT, records, records - 9))


def test_each_epoch_requests_each_row_group_once(folder):
    with serving(folder) as (url, server):
        source = parquet(url)
        assert source.identity() == parquet(folder).identity()
        server.ranges.clear()
        records, _ = order_of(source, 1, True)(np.arange(COUNT))
        for start in range(0, COUNT, 4):
            check(source, records[start : start + 4])
        # pyarrow reads the columns of a small row group at once.
        assert len(server.ranges) == len(set(server.ranges)) == 7


def test_row_groups_are_requested_ahead(folder):
    with serving(folder) as (url, server):
        source = parquet(url, window="1kB")
        names = ["data", "label"]
        metadata = pq.read_metadata(folder / "0.parquet").row_group(2)
        # The bytes and the path of the image, and the label, of rows 5 to 11.
        size = sum(metadata.column(k).total_uncompressed_size for k in (1, 2, 3))
        assert source._range_bytes(np.array([5, 9]), names) == size
        assert read_ahead_of(source) == 2000
        server.ranges.clear()
        records = np.array([33, 30, 5, 11])
        assert source._announce(records, names, np.array([0, 0, 1, 1]), None) == []
        labels = source.read(records, names)["label"]
        assert np.asarray(labels).tolist() == records.tolist()
        assert len(server.ranges) == 2


def test_requests_that_fail_are_repeated(folder):
    with serving(folder) as (url, server):
        server.fault = share_of_requests(0.3, ("503", "reset", "short"), most=2)
        check(parquet(url), np.arange(COUNT))
        assert server.num_faults


def test_a_row_group_is_loaded_again_after_an_error_of_a_server(folder):
    with serving(folder) as (url, server):
        source = parquet(url)
        server.fault = lambda *request: "403"
        with pytest.raises(PermissionError, match="3.parquet"):
            source.read(np.array([COUNT - 1]), ["label"])
        server.fault = None
        assert source.read(np.array([COUNT - 1]), ["label"])["label"] == [COUNT - 1]
        server.tag = '"other"'
        with pytest.raises(OSError, match=r"3\.parquet.* changed"):
            source.read(np.array([COUNT - 1]), ["text"])


def test_a_cache_on_a_disk_stores_row_groups(folder, tmp_path):
    with serving(folder) as (url, server):
        options = {"cache": tmp_path / "cache", "fields": {"label": "label"}}
        for _ in range(2):
            values = parquet(url, **options).read(np.arange(COUNT), ["label"])["label"]
            np.testing.assert_array_equal(values, np.arange(COUNT))
            requests = len(server.ranges)
            server.ranges.clear()
        assert requests == len(COUNTS)  # of the versions of the files


SLOW_EXIT = """
import sys, time
import numpy as np
from dalijax.core.formats.byte_files import ByteFiles
from dalijax.sources import Parquet

source = Parquet(sys.argv[1:])
read = ByteFiles.read

def slow(*arguments):
    print("reading", flush=True)
    time.sleep(2)
    return read(*arguments)

ByteFiles.read = slow
source._announce(np.arange(len(source)), sorted(source.fields), None, None)
time.sleep(0.3)
"""


def test_a_program_ends_while_a_server_is_slow(folder):
    """Threads of pyarrow that wait for Python would abort the process."""
    command = [sys.executable, "-c", SLOW_EXIT, *map(str, sorted(folder.iterdir()))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "reading" in ended.stdout and ended.returncode == 0, ended.stderr


def test_files_of_other_protocols_are_read(folder):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for number in range(4):
        system.pipe(f"/parquet/{number}.parquet", (folder / f"{number}.parquet").read_bytes())
    check(parquet("memory://parquet"), np.arange(COUNT))


def test_a_data_set_of_the_hub_is_read_without_unwanted_bytes(folder):
    pytest.importorskip("huggingface_hub")
    with serving(folder, kind=HubServer) as (url, server):
        source = Parquet(
            "hf://datasets/owner/name/*.parquet",
            FIELDS,
            window=2500,
            storage_options={"endpoint": url, "token": False, "use_listings_cache": False},
        )
        assert source.identity() == parquet(folder).identity()
        server.ranges.clear()
        check(source, np.arange(COUNT))
        assert len(server.ranges) == 7
        sizes = [(folder / path).stat().st_size for path, _, _ in server.ranges]
        assert all(end < size for (_, _, end), size in zip(server.ranges, sizes))


def damage(path, column):
    """Changes a byte of a column of the last row group."""
    metadata = pq.read_metadata(path)
    chunk = metadata.row_group(metadata.num_row_groups - 1).column(column)
    with open(path, "r+b") as file:
        file.seek(chunk.data_page_offset + chunk.total_compressed_size - 1)
        byte = file.read(1)
        file.seek(-1, io.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_row_group_makes_its_rows_bad_records(folder):
    damage(folder / "2.parquet", 1)
    source = parquet(folder)
    bad = list(range(25, 29))
    with pytest.raises(ValueError, match=f"row group 3 of {folder}/2.parquet can't be read: .*CRC"):
        source.read(np.array([3, 26]), ["data"])
    check_label = source.read(np.array(bad), ["label"])["label"]
    np.testing.assert_array_equal(check_label, bad)
    iterator = graph(source=source, batch_size=4, on_error="mask", shuffle=False)
    labels = [row[0] for batch in iterator for row in values(batch)]
    assert labels == [k for k in range(COUNT) if k not in bad]


def no_footer(path):
    path.write_bytes(path.read_bytes()[:-20])


def pointer(path):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
    path.write_text(text)


FAULTS = {
    "cut off": (no_footer, "2.parquet is not a complete Parquet file"),
    "empty": (lambda path: path.write_bytes(b""), "2.parquet is not a complete Parquet file"),
    "a pointer of git-lfs": (pointer, "2.parquet: .*git lfs pull"),
    "no columns": (
        lambda path: pq.write_table(pa.table({"label": [1]}), path),
        r"2.parquet has no columns \['boxes', 'image', 'text'\], unlike the first file. Omit",
    ),
    "another type": (
        lambda path: pq.write_table(pa.table({name: ["x"] for name in SCHEMA.names}), path),
        "/2.parquet: row 0 has no 'image/bytes'. It has <class 'str'>",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_errors_name_the_file(folder, case):
    change, message = FAULTS[case]
    change(folder / "2.parquet")
    with pytest.raises(ValueError, match=message):
        parquet(folder).read(np.array([12]), ["data", "label", "text"])


def test_files_without_rows_are_rejected(folder):
    with pytest.raises(ValueError, match="the 1 files have no rows: .*1.parquet"):
        Parquet(folder / "1.parquet")


def test_a_file_that_was_replaced_is_rejected(folder):
    source = parquet(folder)
    path = folder / "3.parquet"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    check(source, np.arange(COUNT))  # the file is still open
    with pytest.raises(OSError, match=re.escape(f"{path} was changed")):
        pickle.loads(pickle.dumps(source)).read(np.array([COUNT - 1]), ["label"])
