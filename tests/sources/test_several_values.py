"""Several images, texts or arrays in a record: a field each, compared with lists of the values."""

import io
import json
import pickle

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import fn
from PIL import Image as Picture

from dalijax import data_iterator
from dalijax.core.tools.index_command import write_indexes
from dalijax.sources import (
    Field,
    Mixture,
    Named,
    Records,
    Selection,
    Tar,
    TFRecord,
)
from tars import write_tar

tf = pytest.importorskip("tensorflow")
datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")

COUNT, FRAMES = 9, 3


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def picture(record, number):
    return np.full((8, 8 + record, 3), 20 * record + 5 * number, np.uint8)


def encoded(record, number):
    file = io.BytesIO()
    Picture.fromarray(picture(record, number)).save(file, "png")
    return file.getvalue()


PICTURES = [[encoded(record, number) for number in range(FRAMES)] for record in range(COUNT)]


def dicts(rows):
    return [[{"bytes": data, "path": None} for data in row] for row in rows]


def example(**features):
    table = {name: tf.train.Feature(**feature) for name, feature in features.items()}
    message = tf.train.Example(features=tf.train.Features(feature=table))
    return message.SerializeToString()


def write_records(path, rows):
    """Writes a record for each row, a list of bytes; None is a record without the feature."""
    other = {"bytes_list": tf.train.BytesList(value=[b"o"])}
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            values = {"bytes_list": tf.train.BytesList(value=row or [])}
            writer.write(example(other=other, **({} if row is None else {"images": values})))
    return str(path)


def of_huggingface(rows):
    features = datasets.Features({"images": datasets.List(datasets.Image())})
    return datasets.Dataset.from_dict({"images": dicts(rows)}, features=features)


def of_arrow(rows, kind=None):
    return pa.table({"images": pa.array(rows, kind or pa.list_(pa.binary()))})


SOURCES = {
    "lists": lambda rows, path: Records([{"images": row} for row in rows], FIELDS),
    "tuples": lambda rows, path: Records([{"images": (*row,)} for row in rows], FIELDS),
    "dicts": lambda rows, path: Records([{"images": row} for row in dicts(rows)], FIELDS),
    "keys of dicts": lambda rows, path: Records(
        [{"images": row} for row in dicts(rows)], {"frames": ("images/bytes", range(FRAMES))}
    ),
    "records that are lists": lambda rows, path: Records(rows, {"frames": ("", range(FRAMES))}),
    "nested": lambda rows, path: Records(
        [{"a": [{"b/c": row}]} for row in rows], {"frames": ("a/0/b/c", range(FRAMES))}
    ),
    "Arrow": lambda rows, path: Records(of_arrow(rows), FIELDS),
    "large Arrow": lambda rows, path: Records(
        of_arrow(rows, pa.large_list(pa.large_binary())), FIELDS
    ),
    "Arrow views": lambda rows, path: Records(of_arrow(rows, pa.list_view(pa.binary())), FIELDS),
    "Arrow structs": lambda rows, path: Records(of_arrow(dicts(rows), STRUCTS), FIELDS),
    "HuggingFace": lambda rows, path: Records(of_huggingface(rows), FIELDS),
    "a dict of HuggingFace": lambda rows, path: Records(
        datasets.Dataset.from_dict(
            {"turn": [{"images": row} for row in dicts(rows)]},
            features=datasets.Features({"turn": {"images": [datasets.Image()]}}),
        ),
        {"frames": ("turn/images", range(FRAMES))},
    ),
    "HuggingFace's bytes": lambda rows, path: Records(
        of_huggingface(rows), {"frames": ("images/bytes", range(FRAMES))}
    ),
    "a shuffled data set": lambda rows, path: Records(
        of_huggingface(rows[::-1]).select(range(len(rows) - 1, -1, -1)), FIELDS
    ),
    "a formatted data set": lambda rows, path: Records(
        of_huggingface(rows)
        .cast_column("images", datasets.List(datasets.Image(decode=False)))
        .with_format("python"),
        FIELDS,
    ),
    "TFRecord": lambda rows, path: TFRecord(write_records(path / "a", rows), FIELDS),
    "several TFRecords": lambda rows, path: TFRecord(
        [write_records(path / f"{k}", [row]) for k, row in enumerate(rows)], FIELDS
    ),
}
FIELDS = {"frames": ("images", range(FRAMES))}
NAMES = [f"frames_{number}" for number in range(FRAMES)]
STRUCTS = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def contents(source, rows, names=NAMES):
    columns = source.read(np.array(rows), names)
    return [[bytes(columns[name][k]) for name in names] for k in range(len(rows))]


@pytest.mark.parametrize("kind", SOURCES)
def test_each_value_is_a_field(kind, tmp_path):
    source = SOURCES[kind](PICTURES, tmp_path)
    assert dict(source.fields) == dict.fromkeys(NAMES, Field(np.uint8, 1)) and len(source) == COUNT
    rows = [4, 0, 8, 4, 2]
    assert contents(source, rows) == [PICTURES[row] for row in rows]
    assert contents(source, rows, NAMES[2:]) == [PICTURES[row][2:] for row in rows]
    again = pickle.loads(pickle.dumps(source))
    assert contents(again, [3]) == [PICTURES[3]] and again.identity() == source.identity()


FEWER = [PICTURES[0][:1], *PICTURES[1:4], [], *PICTURES[5:7], [*PICTURES[7], b"x", b"y"]]


@pytest.mark.parametrize("kind", SOURCES)
def test_a_record_with_fewer_values_is_bad_and_further_values_are_not_read(kind, tmp_path):
    source = SOURCES[kind](FEWER, tmp_path)
    good = [1, 2, 3, 5, 6, 7]
    assert contents(source, good) == [PICTURES[row] for row in good]
    assert contents(source, [0], NAMES[:1]) == [PICTURES[0][:1]]
    for row, count in ((0, "1 value"), (4, "0 values")):
        with pytest.raises(ValueError, match=rf"record .* has {count}, but fields= requires 3"):
            source.read(np.array([1, row]), NAMES)


def frames(frames_0, frames_1, frames_2):
    decoded = fn.decoders.image([frames_0, frames_1, frames_2])
    return {"frames": fn.stack(*(fn.resize(image, size=(8, 8)) for image in decoded))}


@pytest.mark.parametrize("kind", ("lists", "HuggingFace", "TFRecord"))
def test_iterators_decode_resume_and_mask_bad_records(kind, tmp_path):
    make = data_iterator(frames, mask=True)
    by_kind = {
        "lists": Records([{"images": row} for row in FEWER], FIELDS, identity="v1"),
        "HuggingFace": Records(of_huggingface(FEWER), FIELDS, identity="v1"),
        "TFRecord": TFRecord(write_records(tmp_path / "a", FEWER), FIELDS),
    }
    source = Named(by_kind[kind], index="index")
    options = {"on_error": "mask", "seed": 3}
    batches = list(make(source=source, batch_size=4, **options))
    rows = np.concatenate([batch["index"] for batch in batches]).tolist()
    mask = np.concatenate([batch["mask"] for batch in batches])
    assert len(rows) == 8 and sorted(np.array(rows)[mask]) == [1, 2, 3, 5, 6, 7]
    images = np.concatenate([batch["frames"] for batch in batches])
    for place, row in enumerate(rows):
        if mask[place]:
            expected = [picture(row, number)[0, 0, 0] for number in range(FRAMES)]
            assert images[place].shape == (FRAMES, 8, 8, 3)
            assert (images[place] == np.reshape(expected, (FRAMES, 1, 1, 1))).all()
    first = make(source=source, batch_size=4, **options)
    next(first)
    state = json.loads(json.dumps(first.get_state()))
    other = make(source=by_kind[kind], batch_size=2, **options)
    other.set_state(state)
    later = np.concatenate([batch["frames"] for batch in other])
    np.testing.assert_array_equal(later[mask[4:]], images[4:][mask[4:]])


@pytest.mark.parametrize("kind", ("lists", "HuggingFace", "TFRecord"))
def test_other_numbers_are_other_data(kind, tmp_path):
    first = SOURCES[kind](PICTURES, tmp_path).identity()
    assert SOURCES[kind](PICTURES, tmp_path).identity() == first
    changed = [[row[1], row[0], row[2]] for row in PICTURES]
    assert SOURCES[kind](changed, tmp_path).identity() != first
    one = {
        "lists": Records([{"images": row} for row in PICTURES], {"frames": ("images", [0, 2, 1])}),
        "HuggingFace": Records(of_huggingface(PICTURES), {"frames": ("images", [0, 2, 1])}),
        "TFRecord": TFRecord(
            write_records(tmp_path / "a", PICTURES), {"frames": ("images", [0, 2, 1])}
        ),
    }[kind]
    assert contents(one, [4]) == [[PICTURES[4][k] for k in (0, 2, 1)]]
    assert one.identity() != first


def test_wrappers_and_mixtures_have_the_fields(tmp_path):
    by_list, by_file = (SOURCES[kind](PICTURES, tmp_path) for kind in ("lists", "TFRecord"))
    mixture = Mixture([(Selection(by_list, [1, 5]), 1), (by_file, 1)])
    assert contents(mixture, [1, 2 + 7]) == [PICTURES[5], PICTURES[7]]
    batch = next(data_iterator(frames)(source=mixture, batch_size=2))
    assert batch["frames"].shape == (2, FRAMES, 8, 8, 3)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = next(data_iterator(frames)(source=mixture, batch_size=2, sharding=sharding))
    np.testing.assert_array_equal(placed["frames"], batch["frames"])


def test_a_single_number_keeps_the_name(tmp_path):
    path = write_records(tmp_path / "a", PICTURES)
    for source in (
        TFRecord(path, {"last": ("images", 2), "images": ("images", [1])}),
        Records(of_huggingface(PICTURES), {"last": ("images", 2), "images": ("images", [1])}),
    ):
        assert list(source.fields) == ["last", "images_0"]
        assert contents(source, [4], ["last", "images_0"]) == [PICTURES[4][:0:-1]]


def test_values_of_records_of_any_kind():
    videos = np.arange(2 * 3 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 3, 4, 5, 3)
    rows = [{"video": video, "texts": ["a", "b"], ("video", 1): 7} for video in videos]
    fields = {"v": ("video", range(3)), "t": ("texts", [1, 0]), "key": ("video", 1)}
    source = Records(rows, fields)
    assert [*source.fields] == ["v_0", "v_1", "v_2", "t_0", "t_1", "key"]
    values = source.read(np.array([1]), [*source.fields])
    np.testing.assert_array_equal(np.concatenate([values[f"v_{k}"] for k in range(3)]), videos[1])
    assert values["t_0"] + values["t_1"] == ["b", "a"] and values["key"] == [7]
    assert source.fields["v_0"] == Field(np.uint8, 3) and source.fields["t_0"] == Field(None)
    with pytest.raises(ValueError, match="record 0 has 2 values, but fields= requires 3"):
        Records([{"x": [b"a", b"b"]}] * 3, {"all": "x", "x": ("x", range(3)), "y": ("x", 1)})


def test_images_of_a_data_set_are_not_decoded(monkeypatch):
    monkeypatch.setattr(datasets.Image, "decode_example", None)
    rows = {"images": dicts(PICTURES), "label": [*range(COUNT)]}
    kinds = {"images": datasets.List(datasets.Image()), "label": datasets.Value("int64")}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    table = table.shuffle(seed=1)
    source = Records(table, FIELDS | {"label": "label", "path": "images/0/path"})
    labels = source.read(np.arange(COUNT), ["label"])["label"].tolist()
    assert contents(source, range(COUNT)) == [PICTURES[label] for label in labels]
    first, again = (source.read(np.array([4]), NAMES) for _ in range(2))
    assert all(np.shares_memory(first[name][0], again[name][0]) for name in NAMES)
    assert table.features["images"].feature.decode


# TFRecord


def test_defaults_replace_values_that_records_lack(tmp_path):
    rows = [*FEWER, None]
    path = write_records(tmp_path / "a", rows)
    source = TFRecord(path, FIELDS, defaults=dict.fromkeys(NAMES[1:], b"none"))
    some = [7, 0, 3]
    expected = [([*rows[row], b"none", b"none"])[:3] for row in some]
    assert contents(source, some) == expected
    for row in (4, 8):
        assert contents(source, [row], NAMES[1:]) == [[b"none"] * 2]
        with pytest.raises(ValueError, match="'images' of .* has 0 values, but fields= requires 3"):
            source.read(np.array([row]), NAMES)
    texts = TFRecord(path, {"t": ("images", [0])}, kinds={"t_0": Field(None)})
    assert texts.fields["t_0"] == Field(None)


def test_lists_that_can_not_be_numbered_are_named(tmp_path):
    path = write_records(tmp_path / "a", FEWER)
    with pytest.raises(ValueError, match="no record has more than 5 values of 'images', .* 6"):
        TFRecord(path, {"x": ("images", range(6))})
    with pytest.raises(ValueError, match="no record has 'gone'. The first .*'images'"):
        TFRecord(path, {"x": ("gone", range(2))})
    with pytest.raises(ValueError, match=r"kinds has \['x'\], but the fields are \['x_0', 'x_1'\]"):
        TFRecord(path, {"x": ("images", range(2))}, kinds={"x": Field(None)})
    with tf.io.TFRecordWriter(str(tmp_path / "b")) as writer:
        writer.write(example(n={"int64_list": tf.train.Int64List(value=[1, 2])}))
    with pytest.raises(ValueError, match="'n' of .* is integers, but .* only number byte strings"):
        TFRecord(tmp_path / "b", {"x": ("n", range(2))})


@pytest.mark.parametrize("verify", (False, True))
def test_stored_and_shared_indexes_have_the_values(verify, tmp_path, monkeypatch):
    rows = [FEWER[:4], PICTURES[:2], [row[:1] for row in PICTURES], FEWER[4:]]
    paths = [write_records(tmp_path / f"{k}.tfrecord", part) for k, part in enumerate(rows)]
    source = TFRecord(paths, FIELDS, verify=verify)
    scanned = dict(source._index.arrays)
    stored = TFRecord(paths, FIELDS, verify=verify)
    write_indexes(paths, {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr("dalijax.core.sources.tfrecord.index_records", lambda *_, **__: 1 / 0)
    shared = TFRecord(paths, FIELDS, verify=verify)
    for other in (stored._index.arrays, shared._index.arrays):
        assert scanned.keys() == other.keys()
        for name, array in scanned.items():
            np.testing.assert_array_equal(array, other[name], name)
    flat = [row for part in rows for row in part]
    good = [row for row, values in enumerate(flat) if len(values) >= FRAMES]
    assert contents(shared, good) == [flat[row][:FRAMES] for row in good]
    assert shared.identity() == source.identity()
    single = TFRecord(paths[2], {"x": "images"})
    assert contents(single, [4], ["x"]) == [PICTURES[4][:1]]
    with pytest.raises(ValueError, match="'images' of .*0.tfrecord: record 1 has 3 values instead"):
        TFRecord(paths, {"x": "images"})
    with pytest.raises(ValueError, match="no record has more than 5 values of 'images', .* 7"):
        TFRecord(paths, {"x": ("images", 6)})


def test_a_damaged_record_is_bad(tmp_path):
    path = tmp_path / "a"
    write_records(path, PICTURES)
    content = bytearray(path.read_bytes())
    content[content.index(PICTURES[4][1]) + 50] ^= 1
    path.write_bytes(content)
    source = TFRecord(path, FIELDS)
    others = [row for row in range(COUNT) if row != 4]
    assert contents(source, others) == [PICTURES[row] for row in others]
    with pytest.raises(ValueError, match="record 4 is damaged: its checksum is wrong"):
        source.read(np.array([4]), NAMES)
    assert contents(TFRecord(path, FIELDS, verify=False), [4])[0][0] == PICTURES[4][0]


lists = st.lists(st.lists(st.binary(max_size=300), max_size=5), min_size=1, max_size=6)


@settings(max_examples=30)
@given(rows=lists, numbers=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_any_lists_of_bytes(rows, numbers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    names = [f"x_{k}" for k in range(len(numbers))]
    fields = {"x": ("images", numbers)}
    needed = max(numbers) + 1
    if max(map(len, rows)) < needed:
        with pytest.raises(ValueError, match="no record has more than"):
            TFRecord(write_records(folder / "a", rows), fields)
        return
    records = Records([{"images": row} for row in rows], fields)
    for source in (TFRecord(write_records(folder / "a", rows), fields), records):
        for row, values in enumerate(rows):
            if len(values) >= needed:
                assert contents(source, [row], names) == [[values[n] for n in numbers]]
            else:
                with pytest.raises(ValueError, match=f"requires {needed}"):
                    source.read(np.array([row]), names)


# Tar


def test_a_sample_of_a_tar_has_several_images(tmp_path):
    entries = [
        (f"{record:03d}.{number}.png", PICTURES[record][number])
        for record in range(COUNT)
        for number in range(FRAMES - (record == 5))
    ]
    path = write_tar(tmp_path / "a.tar", entries)
    fields = {f"frames_{number}": f"{number}.png" for number in range(FRAMES)}
    source = Tar(path, fields, missing="skip")
    whole = [row for row in range(COUNT) if row != 5]
    assert contents(source, range(COUNT - 1)) == [PICTURES[row] for row in whole]
    with pytest.raises(ValueError, match=r"005 lacks .2.png \('frames_2'\), and has .0.png, .1"):
        Tar(path, fields)
    images = next(data_iterator(frames)(source=source, batch_size=2, shuffle=False))["frames"]
    assert images.shape == (2, FRAMES, 8, 8, 3)
    assert images[1, :, 0, 0, 0].tolist() == [picture(1, number)[0, 0, 0] for number in range(3)]
