"""Patterns, braces, ``~`` and bytes in paths, compared with a shell."""

import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dalijax.core.formats.paths import braces, path_list
from dalijax.sources import Files, Tar, TFRecord
from full import FULL
from tars import FIELDS, samples, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def by_shell(texts):
    lines = "\n".join(f"printf '%s\\n' x{text}; echo" for text in texts)
    result = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True)
    return [block.split("\n") for block in result.stdout.removesuffix("\n\n").split("\n\n")]


PIECE = st.one_of(
    st.sampled_from(["a", "b,", "{", "}", ",", "{1,2}", "{a,{b,c}}", "{}", "{a}", "."]),
    st.builds("{{{}..{}}}".format, st.integers(-12, 12), st.integers(-12, 12)),
    st.builds("{{{}..{}..{}}}".format, st.integers(0, 9), st.integers(0, 9), st.integers(-3, 3)),
    st.builds("{{{:03d}..{}}}".format, st.integers(0, 12), st.integers(0, 12)),
    st.builds("{{{}..{}}}".format, st.sampled_from("acez"), st.sampled_from("acez")),
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@settings(max_examples=200 if FULL else 8)
@example(
    [
        "{1,2}{}b,}",
        "{a,{}b,}c}",
        "{}b,}",
        "{a}b,}",
        "{},a}",
        "{}{a,b}",
        "{}}",
        "{a{},b}",
        "{1..2}b,c}",
        "{1..}b,c}",
    ]
)
@given(st.lists(st.lists(PIECE, min_size=1, max_size=4).map("".join), min_size=20, max_size=20))
def test_braces_expand_like_in_a_shell(texts):
    assert [list(braces("x" + text)) for text in texts] == by_shell(texts)


def test_ranges_of_webdataset():
    assert list(braces("s3://b/t-{000..127}.tar"))[::127] == [
        "s3://b/t-000.tar",
        "s3://b/t-127.tar",
    ]
    with pytest.raises(ValueError, match="which is too many"):
        list(braces("{0..99999999}"))


def test_patterns_are_sorted_and_literal_names_stay(tmp_path, monkeypatch):
    for name in ("b.tar", "a.tar", "a[1].tar", "x{1,2}.tar", "~.tar", "d.tar/e.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def names(paths):
        return [os.path.relpath(path, tmp_path) for path in path_list(paths)]

    assert names("?.tar") == ["a.tar", "b.tar", "~.tar"]
    assert names("{b,a}.tar") == ["b.tar", "a.tar"]
    assert names("~/[ab].tar") == ["a.tar", "b.tar"]
    assert names("~.tar") == ["~.tar"]
    assert names(["a[1].tar", b"x{1,2}.tar", pathlib.Path("d.tar/*")]) == [
        "a[1].tar",
        "x{1,2}.tar",
        "d.tar/e.tar",
    ]
    assert names("**/e.tar") == ["d.tar/e.tar"]
    assert names(np.array(["a.tar", "b.tar"])) == ["a.tar", "b.tar"]
    for missing in ("*.jpg", "d*", "{a,no*}.tar"):
        with pytest.raises(FileNotFoundError, match="matches no file"):
            path_list(missing)
    for wrong in (3, [3], ["a.tar", None]):
        with pytest.raises(TypeError, match="paths must be a path, or a list of paths, not"):
            path_list(wrong)


def test_sources_take_patterns_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for k in range(3):
        write_tar(tmp_path / f"{k:03d}.tar", samples(k * 2, k * 2 + 2))
    root, whole = str(tmp_path), Tar([tmp_path / f"{k:03d}.tar" for k in range(3)], FIELDS)
    for paths in (
        f"{root}/*.tar",
        f"{root}/{{000..002}}.tar",
        "~/*.tar",
        os.fsencode(root) + b"/*",
    ):
        (tmp_path / "cache").mkdir(exist_ok=True)
        source = Tar(paths, FIELDS)
        assert [source.name(k) for k in range(6)] == [whole.name(k) for k in range(6)]
    with pytest.raises(FileNotFoundError, match=r"003\.tar does not exist"):
        Tar(f"{root}/{{000..003}}.tar", FIELDS)
    for paths in (f"{root}/*.tfrecord", os.fsencode(root) + b"/no.tfrecord"):
        with pytest.raises(FileNotFoundError, match=r"tfrecord (matches no file|does not exist)"):
            TFRecord(paths, {"data": "x"})
    for name in ("c/1.jpg", "c/2.jpg"):
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(b"x")
    names = [str(tmp_path / f"files/c/{k}.jpg") for k in (1, 2)]
    for paths in ("~/files/c/*", f"{root}/files/*/{{1,2}}.jpg", [os.fsencode(n) for n in names]):
        source = Files(paths=paths, labels=[3, 4])
        assert [source.name(k) for k in range(2)] == names
    assert Files(os.fsencode(root) + b"/files").classes == Files("~/files").classes == ("c",)
    assert len(Files(paths=names[0])) == 1
    for pattern in (f"{root}/fil*", f"{root}/{{files,more}}"):
        with pytest.raises(FileNotFoundError, match="a pattern of files as paths="):
            Files(pattern)


def test_patterns_of_urls(tmp_path):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.store.clear()
    for k in range(3):
        path = write_tar(tmp_path / f"{k}.tar", samples(k * 2, k * 2 + 2))
        memory.pipe(f"/d/{k}.tar", pathlib.Path(path).read_bytes())
    urls = [f"memory://d/{k}.tar" for k in range(3)]
    assert path_list("memory://d/{0..2}.tar") == urls
    assert [url.replace(":///", "://") for url in path_list("memory://d/*.tar")] == urls
    assert len(Tar("memory://d/*.tar", FIELDS)) == 6
    assert len(Files(paths="memory://d/[01].tar")) == 2
    with pytest.raises(FileNotFoundError, match=r"memory://d/\*\.jpg matches no file"):
        path_list("memory://d/*.jpg")
    assert path_list("http://host/a.tar?x=1") == ["http://host/a.tar?x=1"]
    memory.store.clear()


def test_patterns_of_urls_match_what_local_patterns_match(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    names = ("a/1.jpg", "a/.2.jpg", ".git/3.jpg", "b/4.jpg", "a/c.jpg/5.jpg", "a/.d/6.jpg", "7.jpg")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        files.pipe(f"/glob/{name}", b"x")
    for pattern in ("*", "*.jpg", "*/*.jpg", ".*/*", "a/.*/*", "[!b]/*", "{a,b}/*.jpg", "a/*/*"):
        local = [os.path.relpath(path, tmp_path) for path in path_list(f"{tmp_path}/{pattern}")]
        remote = path_list(f"memory://glob/{pattern}")
        assert [url.removeprefix("memory:///glob/") for url in remote] == local, pattern
    for root in (str(tmp_path), "memory://glob"):
        with pytest.raises(
            FileNotFoundError, match="matches no file. For names that contain .* a list"
        ):
            path_list(f"{root}/nothing*")
