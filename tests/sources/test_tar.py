"""Tars compared with tarfile, for every format; damaged tars; stored indexes."""

import contextlib
import os
import pickle
import resource
import shutil
import tarfile
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dalijax.core.formats.buffered_reader import BufferedReader
from dalijax.core.formats.byte_files import LocalFile
from dalijax.core.formats.tar_headers import members
from dalijax.sources import Arrays, Field, Mixture, Tar
from tars import FIELDS, sample, samples, write_tar

FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dalijax"


def by_tarfile(path):
    with tarfile.open(path, ignore_zeros=True) as tar:
        return [(m.name, m.offset_data, m.size) for m in tar if m.isfile()]


def walked(path):
    file = LocalFile(path)
    walk = members(BufferedReader(file), file.size, path)
    return [
        (member.name.decode(errors="surrogateescape"), member.offset, member.size)
        for member in walk
        if not member.link
    ]


def other(kind, name, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


NAME = st.text("ab/.é ", min_size=1, max_size=6)
LONG = st.builds(
    lambda part, n: "/".join([part] * n),
    st.text("xyü", min_size=30, max_size=60),
    st.integers(2, 6),
)
ENTRY = st.one_of(
    st.tuples(st.one_of(NAME, LONG), st.binary(max_size=1200)),
    st.builds(
        other,
        st.sampled_from(
            [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
        ),
        st.one_of(NAME, LONG),
        st.one_of(NAME, LONG),
    ),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.lists(ENTRY, max_size=8), form=st.sampled_from(["gnu", "pax"]))
def test_members_match_tarfile(entries, form, tmp_path):
    path = write_tar(tmp_path / "a.tar", entries, FORMATS[form])
    ours, theirs = (
        [(n.rstrip("/"), o, s) for n, o, s in rows] for rows in (walked(path), by_tarfile(path))
    )
    assert ours == theirs  # tarfile strips the slash at the end of some names


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.text("abc", min_size=1, max_size=90), min_size=1, max_size=5),
    content=st.binary(max_size=1200),
)
def test_members_of_ustar_with_prefixes(names, content, tmp_path):
    path = write_tar(
        tmp_path / "a.tar", [("d" * 120 + "/" + n, content) for n in names], tarfile.USTAR_FORMAT
    )
    assert walked(path) == by_tarfile(path)


def test_sizes_in_base_256_and_in_extended_headers(tmp_path):
    size = (8 << 30) + 5  # one more than eleven octal digits hold
    for form in ("gnu", "pax"):
        info = tarfile.TarInfo("big.bin")
        info.size = size
        head = info.tobuf(FORMATS[form])
        with open(tmp_path / "big.tar", "wb") as file:  # sparse: takes no space
            file.write(head)
            file.seek(-(-size // 512) * 512, os.SEEK_CUR)
            end = tarfile.TarInfo("end.bin")
            file.write(end.tobuf(FORMATS[form]) + bytes(1024))
        assert walked(str(tmp_path / "big.tar")) == by_tarfile(tmp_path / "big.tar")
        assert walked(str(tmp_path / "big.tar"))[0] == ("big.bin", len(head), size)


def test_extended_headers_for_all_members(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", pax_headers={"comment": "all"}) as tar:
        tar.addfile(tarfile.TarInfo("1.jpg"))
    assert walked(str(tmp_path / "a.tar")) == by_tarfile(tmp_path / "a.tar")


def test_old_tars(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, [("1.jpg", b"abc"), ("é.jpg", b"d")], tarfile.USTAR_FORMAT)
    data = bytearray(path.read_bytes())
    for at in (0, 1024):  # V7: no magic, no kind; a sum of signed bytes
        data[at + 156] = 0
        data[at + 257 : at + 265] = bytes(8)
        head = data[at : at + 512]
        head[148:156] = b" " * 8
        total = sum(b - 256 if b > 127 else b for b in head)
        data[at + 148 : at + 156] = b"%06o\0 " % total
    path.write_bytes(data)
    assert walked(str(path)) == by_tarfile(path) == [("1.jpg", 512, 3), ("é.jpg", 1536, 1)]


@pytest.mark.usefixtures("language")
def test_samples_by_number(tmp_path):
    paths = [write_tar(tmp_path / f"{k}.tar", samples(k * 5, k * 5 + 5)) for k in range(3)]
    source = Tar(paths, FIELDS)
    assert len(source) == 15
    assert dict(source.fields) == {
        "data": Field(np.dtype(np.uint8), 1),
        "label": Field(np.dtype(np.int32)),
    }
    indices = np.array([14, 0, 7, 7, 3])
    values = source.read(indices, ["label", "data"])
    np.testing.assert_array_equal(values["label"], indices - 3, strict=False)
    assert [v.tobytes() for v in values["data"]] == [sample(i)[0][1] for i in indices]
    assert source.name(7) == f"{paths[1]}: 0007"
    assert list(values) == ["label", "data"]
    assert set(source.read(indices, ["label"])) == {"label"}
    np.testing.assert_array_equal(
        Tar(paths[0], {"x": "cls"}).read(np.arange(5), ["x"])["x"], np.arange(5) - 3
    )


@pytest.mark.parametrize("extensions", ("jpg;jpeg;JPEG;png", "JPG;.jpg", ".JPEG;jpg"))
def test_extensions_of_a_field_may_be_repeated_in_upper_case(tmp_path, extensions):
    path = write_tar(tmp_path / "a.tar", [("1.jpg", b"one"), ("2.JPG", b"two")])
    (values,) = Tar(path, {"data": extensions}).read(np.array([0, 1]), ["data"]).values()
    assert [v.tobytes() for v in values] == [b"one", b"two"]


def test_text_bypasses_the_graph_and_one_of_several_extensions_is_taken(tmp_path):
    entries = [
        *(("a/1.JPG", b"x"), ("a/1.txt", "é".encode()), ("a/1.json", b'{"n": [1]}')),
        *(("a/2.png", b"yy"), ("a/2.json", b"[2]"), ("a/2.txt", b"two")),
    ]
    source = Tar(
        write_tar(tmp_path / "a.tar", entries), {"data": "jpg;png", "text": "txt", "meta": "json"}
    )
    values = source.read(np.array([1, 0]), ["data", "text", "meta"])
    assert [v.tobytes() for v in values["data"]] == [b"yy", b"x"]
    assert values["text"] == ["two", "é"] and values["meta"] == [[2], {"n": [1]}]
    assert source.fields["text"] == source.fields["meta"] == Field(None)


def test_other_members_are_skipped(tmp_path):
    entries = [
        other(tarfile.DIRTYPE, "./"),
        ("README", b"no dot"),
        (".hidden.jpg", b"hidden"),
        ("d.ir/1.jpg", b"1"),
        other(tarfile.SYMTYPE, "d.ir/1.png", "1.jpg"),
        ("d.ir/1.seg.png", b"more"),
        ("d.ir/1.cls", b" 7\n"),
    ]
    source = Tar(write_tar(tmp_path / "a.tar", entries), FIELDS)
    assert len(source) == 1 and source.name(0).endswith(": d.ir/1")
    assert list(source.read(np.array([0]), ["label"])["label"]) == [7]


def test_samples_that_lack_a_member_are_named_or_skipped(tmp_path):
    entries = [e for i in range(6) for e in sample(i)[: 1 if i in (1, 4) else 2]]
    path = write_tar(tmp_path / "a.tar", entries)
    with pytest.raises(
        ValueError,
        match=r"2 samples lack .*a\.tar: 0001 lacks \.cls \('label'\), and has \.jpg; .*0004",
    ):
        Tar(path, FIELDS)
    source = Tar(path, FIELDS, missing="skip")
    np.testing.assert_array_equal(source.read(np.arange(4), ["label"])["label"], [-3, -1, 0, 2])
    assert source.name(3).endswith(": 0005")
    with pytest.raises(ValueError, match=r"no sample of .* has all of \['png'\]: .*0000 lacks"):
        Tar(path, {"data": "png"}, missing="skip")
    with pytest.raises(ValueError, match="'raise' or 'skip'"):
        Tar(path, FIELDS, missing="drop")


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_tar_is_refused_when_it_is_opened(form, tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 4), FORMATS[form])
    data = (tmp_path / "a.tar").read_bytes()
    members = by_tarfile(path)
    for end in range(1, 1 + members[-1][1] + members[-1][2], 97):
        (tmp_path / "cut.tar").write_bytes(data[:end])
        within = [m for m in members if m[1] < end]
        whole = not within or end >= within[-1][1] + within[-1][2]
        if whole and end % 512 == 0:
            continue  # between two members: a tar without its end mark
        with pytest.raises(ValueError, match="is cut off") as error:
            walked(str(tmp_path / "cut.tar"))
        if not whole:
            assert repr(within[-1][0]) in str(error.value)
    with pytest.raises(
        ValueError,
        match=r"cut\.tar: member '0003\.jpg' at byte .* is cut off: it needs 43 bytes",
    ):
        (tmp_path / "cut.tar").write_bytes(data[: members[6][1] + 1])
        Tar(tmp_path / "cut.tar", FIELDS)


def test_a_tar_without_its_end_mark_warns(tmp_path, caplog):
    path = write_tar(tmp_path / "a.tar", samples(0, 2))
    with open(path, "r+b") as file:
        file.truncate(4 * 1024)
    assert len(Tar(path, FIELDS)) == 2
    assert "no end mark: it may be cut off after '0001.cls'" in caplog.text


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 3))
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[1024] ^= 1
    (tmp_path / "b.tar").write_bytes(data)
    with pytest.raises(ValueError, match=r"no tar header at byte 1,024, after '0000\.jpg'"):
        Tar(tmp_path / "b.tar", FIELDS)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(path)
    with pytest.raises(ValueError, match=r"a\.tar\.gz is not a tar: it is compressed"):
        Tar(tmp_path / "a.tar.gz", FIELDS)
    write_tar(tmp_path / "empty.tar", [])
    with pytest.raises(ValueError, match=r"empty\.tar has no samples"):
        Tar(tmp_path / "empty.tar", FIELDS)
    with pytest.raises(FileNotFoundError, match=r"gone\.tar does not exist"):
        Tar([path, tmp_path / "gone.tar"], FIELDS)
    write_tar(tmp_path / "label.tar", [("1.jpg", b""), ("1.cls", b"cat")])
    with pytest.raises(ValueError, match=r"'label' of .*label\.tar: 1\.cls must.*b'cat'.*\.txt"):
        Tar(tmp_path / "label.tar", FIELDS)
    write_tar(tmp_path / "twice.tar", [("1.jpg", b""), ("1.cls", b"1"), ("1.jpg", b"")])
    with pytest.raises(ValueError, match=r"twice\.tar has the member '1\.jpg' twice"):
        Tar(tmp_path / "twice.tar", FIELDS)
    write_tar(tmp_path / "json.tar", [("1.json", b"{")])
    with pytest.raises(ValueError, match=r"'x' of .*json\.tar: 1 can't be read"):
        Tar(tmp_path / "json.tar", {"x": "json"}).read(np.array([0]), ["x"])
    for fields, words in (
        ({}, "must map names of fields to extensions"),
        ({"x": "a;b", "y": ".B"}, "'b' for two fields, 'x' and 'y'"),
        ({"jpg": "x", "png": "x"}, "'x' for two fields, 'jpg' and 'png'"),
        ({"x": "a;;b"}, r"fields\['x'\] has an empty extension: 'a;;b'"),
        ({"x": "__key__", "y": "__url__"}, r"only \['__key__', '__url__'\]. Add a member"),
    ):
        with pytest.raises(ValueError, match=words):
            Tar(path, fields)
    with pytest.raises(ValueError, match="paths is empty"):
        Tar([], FIELDS)


def test_any_flipped_bit_of_a_header_is_detected_or_harmless(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 2), tarfile.USTAR_FORMAT)
    data, expected = (tmp_path / "a.tar").read_bytes(), walked(path)
    for bit in range(0, 512 * 8, 7):
        damaged = bytearray(data)
        damaged[1024 + bit // 8] ^= 1 << bit % 8
        (tmp_path / "b.tar").write_bytes(damaged)
        with contextlib.suppress(ValueError):
            assert walked(str(tmp_path / "b.tar")) == expected, bit


@pytest.mark.usefixtures("language")
def test_a_changed_tar_is_not_read(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 3))
    source = Tar(path, FIELDS)
    write_tar(tmp_path / "a.tar", samples(0, 30))
    with pytest.raises(OSError, match="bytes, but had .* when the source was opened. Reopen"):
        source.read(np.array([0]), ["data"])
    opened = Tar(path, FIELDS)
    opened.read(np.array([0]), ["data"])
    os.truncate(path, 58 * 1024 + 512 + 30)
    with pytest.raises(OSError, match=r"'data' of .*a\.tar: 0029 is cut off: only \d+ of its 69"):
        opened.read(np.array([3, 29]), ["data"])
    assert opened.read(np.array([3]), ["data"])["data"][0].tobytes() == sample(3)[0][1]


# Indexes


def same(source, other):
    rows = np.arange(len(other))
    assert len(source) == len(other)
    first, second = (s.read(rows, ["data", "label"]) for s in (source, other))
    np.testing.assert_array_equal(first["label"], second["label"])
    assert [a.tobytes() for a in first["data"]] == [a.tobytes() for a in second["data"]]
    assert [source.name(i) for i in rows] == [other.name(i) for i in rows]


def test_the_stored_index_is_used_and_validated(tmp_path, cache, caplog):
    path = write_tar(tmp_path / "a.tar", samples(0, 20))
    first = Tar(path, FIELDS)
    (kept,) = cache.iterdir()
    stamp = kept.stat().st_mtime_ns
    again = Tar(path, FIELDS)
    assert kept.stat().st_mtime_ns == stamp and not caplog.records
    same(again, first)
    data = kept.read_bytes()
    for damage in (
        data[:-1],
        data[:100],
        b"",
        data[:200] + b"\1" + data[201:],
        data[:-40] + b"\1" * 40,
    ):
        kept.write_bytes(damage)
        caplog.clear()
        same(Tar(path, FIELDS), first)
        assert "rebuilt" in caplog.text and kept.read_bytes() == data
    assert list(cache.iterdir()) == [kept]


def test_an_index_of_other_content_is_rebuilt(tmp_path, cache, caplog):
    path = write_tar(tmp_path / "a.tar", samples(0, 5))
    Tar(path, FIELDS)
    (kept,) = cache.iterdir()
    shifted = [("x.txt", b""), *samples(0, 5)]
    write_tar(tmp_path / "b.tar", shifted)
    Tar(tmp_path / "b.tar", FIELDS, missing="skip")
    (other,) = set(cache.iterdir()) - {kept}
    shutil.copy(kept, other)  # that a digest of a few blocks may miss
    caplog.clear()
    source = Tar(tmp_path / "b.tar", FIELDS, missing="skip")
    assert "belongs to other files" in caplog.text
    assert source.read(np.array([4]), ["data"])["data"][0].tobytes() == sample(4)[0][1]


def test_a_read_only_cache_warns(tmp_path, caplog):
    path = write_tar(tmp_path / "a.tar", samples(0, 5))
    (tmp_path / "file").write_bytes(b"")
    source = Tar(path, FIELDS, cache_dir=tmp_path / "file" / "below")
    assert "can't be stored" in caplog.text
    same(pickle.loads(pickle.dumps(source)), source)


def test_the_identity_does_not_depend_on_the_path(tmp_path):
    for folder in ("x", "y/z"):
        (tmp_path / folder).mkdir(parents=True)
    first = [write_tar(tmp_path / "x" / f"{k}.tar", samples(k * 5, k * 5 + 5)) for k in range(2)]
    second = [shutil.copy(path, tmp_path / "y/z") for path in first]
    identity = Tar(first, FIELDS).identity()
    assert Tar(second, FIELDS).identity() == identity
    assert Tar(second[::-1], FIELDS).identity() != identity
    assert Tar(second[:1], FIELDS).identity() != identity
    data = bytearray((tmp_path / "y/z/1.tar").read_bytes())
    data[512] ^= 1
    (tmp_path / "y/z/1.tar").write_bytes(data)
    assert Tar(second, FIELDS).identity() != identity
    assert Tar(second, FIELDS, identity="mine").identity() == "mine"


@pytest.mark.usefixtures("language")
def test_a_source_pickles_and_reopens_its_files(tmp_path):
    paths = [write_tar(tmp_path / f"{k}.tar", samples(k * 5, k * 5 + 5)) for k in range(2)]
    source = Tar(paths, FIELDS)
    source.read(np.arange(10), ["data"])
    assert len(pickle.dumps(source)) < 4000
    same(pickle.loads(pickle.dumps(source)), source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, which the child does not use
        pid = os.fork()
    if not pid:
        try:
            right = source.read(np.array([9]), ["data"])["data"][0].tobytes() == sample(9)[0][1]
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    same(source, Tar(paths, FIELDS))


@pytest.mark.usefixtures("language")
def test_files_are_closed_when_the_source_is_dropped(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples(0, 3))
    source = Tar(path, FIELDS)

    def is_open():
        links = (os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
        return path in links

    assert not is_open()
    source.read(np.arange(3), ["data"])
    assert is_open()
    del source
    assert not is_open()


@pytest.mark.usefixtures("language")
def test_many_tars_do_not_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr("dalijax.core.formats.byte_files.most_open", lambda: 2)
    paths = [write_tar(tmp_path / f"{k}.tar", samples(k, k + 1)) for k in range(6)]
    source = Tar(paths, FIELDS)
    values = source.read(np.array([5, 0, 3, 1, 4, 2, 5]), ["data"])["data"]
    assert [v.tobytes() for v in values] == [sample(i)[0][1] for i in (5, 0, 3, 1, 4, 2, 5)]
    assert len(source._files._open) <= 2


def test_tars_are_not_kept_open_while_others_are_indexed(tmp_path):
    there = len(os.listdir("/proc/self/fd"))
    count = 3 * there
    paths = [write_tar(tmp_path / f"{k}.tar", samples(k, k + 1)) for k in range(count)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A source keeps files open up to half of the limit, so that another quarter remains.
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * there, limits[1]))
    try:
        source = Tar(paths, FIELDS)
        values = source.read(np.arange(count), ["label"])["label"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_array_equal(values, np.arange(count) - 3)


@pytest.mark.usefixtures("language")
def test_threads_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("dalijax.core.formats.byte_files.most_open", lambda: 2)
    paths = [write_tar(tmp_path / f"{k}.tar", samples(k * 9, k * 9 + 9)) for k in range(6)]
    source = Tar(paths, FIELDS)

    def read(seed):
        rows = np.random.default_rng(seed).integers(0, 54, 40)
        values = source.read(rows, ["data", "label"])
        assert [v.tobytes() for v in values["data"]] == [sample(i)[0][1] for i in rows]
        np.testing.assert_array_equal(values["label"], rows - 3)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(200))) == [None] * 200


def test_a_mixture_of_tars(tmp_path):
    one, two = (
        Tar(write_tar(tmp_path / f"{k}.tar", samples(k * 5, k * 5 + 5)), FIELDS) for k in range(2)
    )
    values = Mixture([(one, 1), (two, 3)]).read(np.array([9, 0, 5]), ["data", "label"])
    assert [v.tobytes() for v in values["data"]] == [sample(i)[0][1] for i in (9, 0, 5)]
    assert [int(v) for v in values["label"]] == [6, -3, 2]
    with pytest.raises(ValueError, match="equal fields"):
        Mixture([(one, 1), (Arrays({"x": np.zeros(3)}), 1)])


@pytest.mark.usefixtures("language")
def test_each_read_has_its_own_buffer(tmp_path):
    source = Tar(write_tar(tmp_path / "a.tar", samples(0, 8)), FIELDS)
    first = source.read(np.array([1, 2]), ["data"])["data"]
    before = [v.tobytes() for v in first]
    second = source.read(np.array([3, 4]), ["data"])["data"]
    assert first[0].base is first[1].base and first[0].base is not second[0].base
    assert [v.tobytes() for v in first] == before
    assert all(v.ctypes.data % 8 == 0 for v in [*first, *second])
