"""Samples of tars: kinds by extension, concatenated and unusual tars, incomplete samples."""

import gzip
import re
import tarfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dalijax import data_iterator
from dalijax.core.tools.index_command import write_indexes
from dalijax.errors import BatchError
from dalijax.sources import Field, Tar
from tars import FIELDS, sample, samples, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def link(name, target, kind=tarfile.LNKTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def read_all(source):
    values = source.read(np.arange(len(source)), list(source.fields))
    return {k: [v.tobytes() if isinstance(v, np.ndarray) else v for v in values[k]] for k in values}


NUMBER = Field(np.dtype(np.int32))
BYTES = Field(np.dtype(np.uint8), 1)
KINDS = {
    "cls": (b" 3\n", NUMBER, 3),
    "label.cls": (b"3", NUMBER, 3),
    "a.b.CLS": (b"-3", NUMBER, -3),
    "x.cls2": (b"3", NUMBER, 3),
    "y.index": (b"3", NUMBER, 3),
    "y.inx": (b"3", NUMBER, 3),
    "y.id": (b"3", NUMBER, 3),
    "seg.txt": ("é".encode(), Field(None), "é"),
    "a.TEXT": (b"t", Field(None), "t"),
    "en.transcript": (b"t", Field(None), "t"),
    "meta.json": (b'{"a": 1}', Field(None), {"a": 1}),
    "meta.jsn": (b"[1]", Field(None), [1]),
    "x.npy": (b"12", BYTES, b"12"),
    "seg.JPG": (b"12", BYTES, b"12"),
    "cls.jpg": (b"12", BYTES, b"12"),
    "json.gz": (b"12", BYTES, b"12"),
    "idx": (b"12", BYTES, b"12"),
}


@pytest.mark.parametrize("extension", KINDS)
def test_the_last_part_of_an_extension_determines_the_kind(extension, tmp_path):
    content, field, value = KINDS[extension]
    path = write_tar(tmp_path / "a.tar", [(f"a.b/{k}.{extension}", content) for k in range(2)])
    for wanted in (extension, extension.lower(), f".{extension}"):
        source = Tar(path, {"x": wanted})
        assert source.fields == {"x": field}
        assert read_all(source)["x"] == [value] * 2
        assert source.name(1).endswith("a.tar: a.b/1")


def test_compound_labels_reach_the_batch_as_numbers(tmp_path):
    entries = [(f"{k}.{e}", b"%d" % k) for k in range(4) for e in ("x.npy", "label.cls")]
    source = Tar(write_tar(tmp_path / "a.tar", entries), {"data": "x.npy", "label": "label.cls"})
    graph = data_iterator(lambda data, label: (data, label), ["x", "y"], as_numpy=True)
    batch = next(graph(source=source, batch_size=4, shuffle=False))
    np.testing.assert_array_equal(batch["y"], np.arange(4, dtype=np.int32), strict=True)
    assert batch["x"][:, 0].tobytes() == b"0123"


@pytest.mark.parametrize("joined", ("jpg;cls", "txt;json", "cap.txt;x.npy"))
def test_a_field_has_one_kind(joined, tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 2))
    with pytest.raises(ValueError, match=r"different kinds in 'x': .*Give each its own field"):
        Tar(path, {"x": joined})


def concatenated(tmp_path, *parts):
    path = tmp_path / "all.tar"
    path.write_bytes(b"".join(parts))
    return str(path)


def tar_bytes(tmp_path, entries, form=tarfile.PAX_FORMAT):
    with open(write_tar(tmp_path / "part.tar", entries, form), "rb") as file:
        return file.read()


JUNK = {
    "nothing": b"",
    "blocks of zeros": bytes(3 * 512),
    "many zeros": bytes(200_000),
    "zeros that end within a block": bytes(700),
}


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize(
    "form", (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT), ids=str
)
def test_concatenated_tars_are_read_to_the_end(junk, form, tmp_path):
    parts = [tar_bytes(tmp_path, samples(k * 3, k * 3 + 3), form) for k in range(3)]
    path = concatenated(tmp_path, *parts, JUNK[junk])
    source = Tar(path, FIELDS)
    assert read_all(source)["data"] == [sample(k)[0][1] for k in range(9)]
    with tarfile.open(path, ignore_zeros=True) as tar:
        assert len(tar.getnames()) == 2 * len(source)
    assert source.name(8).endswith(": 0008")


def test_a_tar_after_many_zeros_is_read(tmp_path):
    parts = [tar_bytes(tmp_path, samples(k * 3, k * 3 + 3)) for k in range(2)]
    source = Tar(concatenated(tmp_path, bytes(1024), parts[0], bytes(300_032), parts[1]), FIELDS)
    assert [int.from_bytes(n, "little") for n in read_all(source)["label"]] == [
        (k - 3) % 2**32 for k in range(6)
    ]


def test_samples_of_concatenated_tars_do_not_mix(tmp_path):
    """The last sample of a tar and the first of the next tar have the same name."""
    one = tar_bytes(tmp_path, [("1.jpg", b"A"), ("1.cls", b"1")])
    two = tar_bytes(tmp_path, [("1.jpg", b"B"), ("1.cls", b"2")])
    source = Tar(concatenated(tmp_path, one, two), FIELDS)
    assert read_all(source)["data"] == [b"A", b"B"]


def test_one_block_of_zeros_does_not_end_a_sample(tmp_path):
    whole = tar_bytes(tmp_path, sample(1), tarfile.USTAR_FORMAT)
    path = concatenated(tmp_path, whole[:1024], bytes(512), whole[1024:])
    assert read_all(Tar(path, FIELDS))["data"] == [sample(1)[0][1]]


def test_bytes_after_the_end_mark_warn_and_damage_raises(tmp_path, caplog):
    whole = tar_bytes(tmp_path, samples(0, 2))
    path = concatenated(tmp_path, whole, b"garbage " * 200)
    assert len(Tar(path, FIELDS)) == 2
    assert "all.tar: 1,600 bytes after the end mark are ignored: they are not a tar" in caplog.text
    damaged = bytearray(whole)
    damaged[3] ^= 1
    with pytest.raises(ValueError, match=rf"no tar header at byte {len(whole):,}"):
        Tar(concatenated(tmp_path, whole, damaged), FIELDS)
    with pytest.raises(ValueError, match=r"is cut off"):
        Tar(concatenated(tmp_path, whole, whole[:700]), FIELDS)
    with pytest.raises(ValueError, match="it is compressed"):
        Tar(concatenated(tmp_path, gzip.compress(whole)), FIELDS)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    archives=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["1", "2", "d/1", "d.e/1", ".h", "__x__/1", "é" * 60, "y" * 120]),
                st.sampled_from(["", ".jpg", ".JPG", ".cls", ".a.cls", ".seg.jpg"]),
                st.integers(0, 1200),
            ),
            max_size=6,
        ),
        min_size=1,
        max_size=3,
    ),
    zeros=st.integers(0, 3),
)
def test_an_index_of_dali_next_to_a_tar_changes_nothing(archives, zeros, tmp_path):
    """Members match tarfile, and samples are grouped like WebDataset groups them."""
    forms = (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
    path = concatenated(
        tmp_path,
        *(
            tar_bytes(tmp_path, [(n + e, b"7" * size) for n, e, size in entries], form)
            + bytes(512 * zeros)
            for entries, form in zip(archives, forms)
        ),
    )
    (tmp_path / "all.idx").write_text("v1.2 1\njpg 512 1 1.jpg\n")
    wanted, twice, data = [], False, (tmp_path / "all.tar").read_bytes()
    for entries in archives:
        last, found = None, {}
        for name, extension, size in entries:
            if extension and re.match(r"[^_.]", name.rpartition("/")[2]) and name[:2] != "__":
                if name != last:
                    last, found = name, {}
                    wanted.append((name, found))
                twice |= extension[1:].lower() in found
                found[extension[1:].lower()] = b"7" * size
    try:
        source = Tar(path, {"x": "jpg"}, missing="skip")
    except ValueError as error:
        whole = [found for _, found in wanted if "jpg" in found]
        assert ("twice" in str(error)) if twice else not whole
        return
    assert not twice
    whole = [(name, found["jpg"]) for name, found in wanted if "jpg" in found]
    names = [source.name(k).rpartition(": ")[2] for k in range(len(source))]
    assert list(zip(names, read_all(source)["x"])) == whole
    assert all(content in data for _, content in whole)


def test_index_paths_of_local_tars_are_not_read(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 3))
    with pytest.warns(UserWarning, match="does not read index_paths of local tars. Omit") as caught:
        source = Tar(path, FIELDS, index_paths=tmp_path / "missing.idx")
    assert caught[0].filename == __file__
    assert read_all(source) == read_all(Tar(path, FIELDS))


# Incomplete samples


def test_an_unsorted_tar_is_named_with_the_fix(tmp_path, caplog):
    entries = [(f"{k}.{e}", b"1") for e in ("jpg", "cls") for k in range(3)]
    path = write_tar(tmp_path / "a.tar", entries)
    words = r"a\.tar: 0 lacks \.cls .*members of .*a\.tar: 0, .*are not adjacent.*--sort="
    for fields in (FIELDS, {"label": "cls"}, {"data": "jpg"}):
        with pytest.raises(ValueError, match="are not adjacent") as error:
            Tar(path, fields)
        assert "missing=" not in str(error.value)
    with pytest.raises(ValueError, match=words):
        Tar(path, FIELDS)
    with pytest.raises(ValueError, match=r"no sample of .*" + words):
        Tar(path, FIELDS, missing="skip")
    more = write_tar(tmp_path / "b.tar", [*entries, *sample(9)])
    assert len(Tar(more, FIELDS, missing="skip")) == 1
    assert "skips 6 samples" in caplog.text and "--sort=name" in caplog.text
    # Concatenated tars of images and labels are as bad.
    parts = [tar_bytes(tmp_path, entries[:3]), tar_bytes(tmp_path, entries[3:])]
    with pytest.raises(ValueError, match="are not adjacent"):
        Tar(concatenated(tmp_path, *parts), FIELDS)
    # A sample that is incomplete, but complete in another tar, is not unsorted.
    parts = [tar_bytes(tmp_path, sample(1)), tar_bytes(tmp_path, sample(1)[:1])]
    with pytest.raises(ValueError, match=r"1 sample lacks .*missing='skip'"):
        Tar(concatenated(tmp_path, *parts), FIELDS)


@pytest.mark.parametrize(
    "kind, word", ((tarfile.LNKTYPE, "hard"), (tarfile.SYMTYPE, "symbolic")), ids=("hard", "soft")
)
def test_links_are_named_with_the_fix(kind, word, tmp_path):
    whole = [("1.cls", b"1"), ("1.jpg", b"A")]
    path = write_tar(tmp_path / "a.tar", [*whole, ("2.cls", b"2"), link("2.jpg", "1.jpg", kind)])
    words = rf"a\.tar: 2 lacks 2\.jpg, which is a {word} link, and has \.cls.*--hard-dereference"
    with pytest.raises(ValueError, match=words) as error:
        Tar(path, FIELDS)
    assert "missing=" not in str(error.value)
    assert read_all(Tar(path, FIELDS, missing="skip"))["data"] == [b"A"]
    # Without a regular member, the sample would be lost silently.
    links = [link("2.cls", "1.cls", kind), link("2.jpg", "1.jpg", kind)]
    path = write_tar(tmp_path / "b.tar", [*whole, *links])
    with pytest.raises(ValueError, match=r"b\.tar: 2 lacks .*and has no other member"):
        Tar(path, FIELDS)
    # Links before, between and after the members of another sample do not end it.
    for at in range(3):
        entries = [*whole[:at], *links, *whole[at:]]
        path = write_tar(tmp_path / f"{at}.tar", entries)
        with pytest.raises(ValueError, match=r"^1 sample lacks .*: 2 lacks .*--hard-dereference"):
            Tar(path, FIELDS)
        assert read_all(Tar(path, FIELDS, missing="skip"))["data"] == [b"A"]
    # Links that no field needs do no harm.
    path = write_tar(tmp_path / "c.tar", [*whole, link("1.png", "1.jpg", kind)])
    assert read_all(Tar(path, {"data": "jpg;png"}))["data"] == [b"A"]
    assert len(Tar(path, FIELDS)) == 1


@pytest.mark.parametrize("missing", ("raise", "skip"))
@pytest.mark.parametrize(
    "right",
    (
        {"image": "jpg", "label": "cls"},
        {"image": "jpg"},
        {"image": ".JPG", "text": "seg.txt"},
        {"image": "png;jpg", "label": "cls"},
        {"image": "jpg", "key": "__key__", "tar": "__url__"},
    ),
    ids=str,
)
def test_swapped_fields_are_corrected(right, missing, tmp_path):
    entries = [(f"{k}.{extension}", b"1") for k in range(2) for extension in ("cls", "seg.txt")]
    path = write_tar(tmp_path / "a.tar", sorted([*entries, ("0.jpg", b"A"), ("1.jpg", b"B")]))
    assert len(Tar(path, right)) == 2
    words = rf"names of fields to extensions, .* Did you mean {re.escape(str(right))}\? If not"
    with pytest.raises(ValueError, match=words):
        Tar(path, {extension: name for name, extension in right.items()}, missing=missing)


def test_fields_named_like_extensions_are_not_taken_for_swapped(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("1.jpg", b"A"), ("2.cls", b"1"), ("3.jpg", b"B")])
    for fields in ({"jpg": "jpg", "cls": "cls"}, {"cls": "jpg"}):
        with pytest.raises(ValueError, match=r"lacks? ") as error:
            Tar(path, fields)
        assert "Did you mean" not in str(error.value)


def test_sparse_files_and_zero_length_members(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("1.jpg", b""), ("1.cls", b"1")])
    assert read_all(Tar(path, FIELDS))["data"] == [b""]
    info = tarfile.TarInfo("1.jpg")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "b.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ValueError, match=r"'1\.jpg' is a sparse file. Pack it again without --spa"):
        Tar(tmp_path / "b.tar", FIELDS)


APART = {
    "folders": [
        [("img/1.jpg", b"A"), ("img/2.jpg", b"B"), ("lab/1.cls", b"1"), ("lab/2.cls", b"2")]
    ],
    "dot": [[("./1.jpg", b"A"), ("1.cls", b"1")]],
    "tars": [[("1.jpg", b"A"), ("2.jpg", b"B")], [("1.cls", b"1"), ("2.cls", b"2")]],
}


@pytest.mark.parametrize("missing", ("raise", "skip"))
@pytest.mark.parametrize("case", APART)
def test_samples_that_lack_the_members_of_each_other_are_named(case, missing, tmp_path):
    paths = [write_tar(tmp_path / f"{k}.tar", e) for k, e in enumerate(APART[case])]
    words = r"These are different samples: .*0\.tar: \S*1 and .*: \S*1.* the same directory and"
    with pytest.raises(ValueError, match=words) as error:
        Tar(paths, FIELDS, missing=missing)
    assert "missing=" not in str(error.value)


@pytest.mark.parametrize("missing", ("raise", "skip"))
def test_no_error_suggests_skipping_every_sample(missing, tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a/1.jpg", b"A"), ("b/1.jpg", b"B")])
    with pytest.raises(ValueError, match=r"fields= that the samples have: \.jpg$"):
        Tar(path, FIELDS, missing=missing)
    for name in ("README", ".hidden.jpg", "__meta__/1.jpg"):
        path = write_tar(tmp_path / "b.tar", [(name, b"1")])
        with pytest.raises(ValueError, match=r"b\.tar has no samples. .* such as 0001\.jpg"):
            Tar(path, FIELDS, missing=missing)


@pytest.mark.parametrize(
    ("fields", "words"),
    (
        ({b"x": "jpg"}, "names of fields must be strings, not b'x'"),
        ({"": "jpg"}, "names of fields must be strings, not ''"),
        ({"x": b"jpg"}, r"fields\['x'\] must be an extension, .* not b'jpg'"),
        ({"x": ["jpg", "png"]}, r"such as 'jpg;png', .* not \['jpg', 'png'\]"),
        ({"x": None}, "must be an extension, .* not None"),
    ),
)
def test_fields_are_text(fields, words, tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 2))
    with pytest.raises(TypeError, match=words):
        Tar(path, fields)


@pytest.mark.parametrize("form", (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT), ids=str)
def test_a_tar_that_ends_after_an_extended_header_is_truncated(form, tmp_path):
    whole = tar_bytes(tmp_path, samples(0, 2), form)
    long = tar_bytes(tmp_path, [("é" * 120 + ".jpg", b"A")], form)
    for start in (b"", whole):
        with pytest.raises(ValueError, match=r"cut off: the extended header .* has no member"):
            Tar(concatenated(tmp_path, start, long[:1024]), FIELDS)


NO_NUMBERS = (b"cat", b"", b"3.0", b"%d" % (1 << 70), "\ufeff3".encode(), b"\xff", b"1 2", b"\0")


@pytest.mark.parametrize("shared", (False, True))
def test_labels_that_are_no_integers_are_bad_records(shared, tmp_path):
    labels = [b"0", *NO_NUMBERS, b" -7\n", b"%d" % (1 << 40)]
    entries = [(f"{k}.{e}", x) for k, b in enumerate(labels) for e, x in (("x", b"x"), ("cls", b))]
    (tmp_path / "d").mkdir()
    path = write_tar(tmp_path / "d/a.tar", entries)
    if shared:
        write_indexes([path], {})
    for missing in ("raise", "skip"):
        source = Tar(path, {"data": "x", "label": "cls"}, missing=missing)
        assert len(source) == len(labels)
        good = np.array([0, len(labels) - 2, len(labels) - 1])
        assert source.read(good, ["label"])["label"].tolist() == [0, -7, 1 << 40]
        assert len(source.read(np.arange(len(labels)), ["data"])["data"]) == len(labels)
        for record, label in enumerate(NO_NUMBERS, 1):
            words = rf"'label' of .*a\.tar: {record}\.cls must be an integer of 64 bits, not "
            with pytest.raises(ValueError, match=words + re.escape(repr(label)) + r"\. .*\.txt"):
                source.read(np.array([0, record]), ["label", "data"])


@pytest.mark.parametrize("on_error", ("raise", "skip", "mask"))
def test_a_label_that_is_no_integer_is_subject_to_on_error(on_error, tmp_path):
    labels = [b"cat" if k == 5 else b"%d" % k for k in range(12)]
    path = write_tar(tmp_path / "a.tar", [(f"{k:02d}.cls", b) for k, b in enumerate(labels)])
    make = data_iterator(lambda y: y + 0, ["y"], on_error=on_error, mask="m", as_numpy=True)
    iterator = iter(make(source=Tar(path, {"y": "cls"}), batch_size=4, shuffle=False))
    delivered = []
    for batches in range(3):
        try:
            batch = next(iterator)
        except StopIteration:
            assert on_error == "skip" and batches == 2
        except BatchError as error:
            assert on_error == "raise" and batches == 1 and "05.cls must be" in str(error)
        else:
            delivered += batch["y"][batch["m"]].tolist()
    lost = {5} if on_error == "mask" else {4, 5, 6, 7}
    assert delivered == [k for k in range(12) if k not in lost]


def test_json_that_is_nested_too_deeply_is_a_bad_record(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("1.json", b"[" * 100_000), ("2.json", b"1")])
    source = Tar(path, {"x": "json"})
    with pytest.raises(ValueError, match=r"'x' of .*a\.tar: 1 can't be read"):
        source.read(np.arange(2), ["x"])
    assert source.read(np.array([1]), ["x"]) == {"x": [1]}
