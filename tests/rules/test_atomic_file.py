"""Atomic files: complete or absent, and safe from links, concurrent writers and killed writers."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from dalijax.core.formats import atomic_file as module
from dalijax.core.formats.atomic_file import atomic_file, write_output

MODULE = module.__file__


def write(path, content):
    with atomic_file(path) as file:
        file.write(content)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_the_umask_decides_the_permissions(tmp_path, umask):
    before = os.umask(umask)
    try:
        write(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_block_leaves_the_old_file(tmp_path):
    write(tmp_path / "a", b"old")
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "a") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_an_open_file_keeps_its_content(tmp_path):
    write(tmp_path / "a", b"old")
    with open(tmp_path / "a", "rb") as before:
        write(tmp_path / "a", b"new")
        assert before.read() == b"old"
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "a").symlink_to(tmp_path / "target")
    write(tmp_path / "a", b"new")
    assert not (tmp_path / "a").is_symlink() and (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_many_writers_leave_one_complete_file(tmp_path):
    contents = [bytes([k]) * 100_000 for k in range(16)]

    def rewrite(content):
        for _ in range(20):
            write(tmp_path / "a", content)

    threads = [threading.Thread(target=rewrite, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "a").exists():
            assert (tmp_path / "a").read_bytes() in contents
    for thread in threads:
        thread.join()
    assert (tmp_path / "a").read_bytes() in contents and os.listdir(tmp_path) == ["a"]


# Only the module: the package would import JAX and DALI.
WRITER = """
import runpy, sys
with runpy.run_path(sys.argv[1])["atomic_file"](sys.argv[2]) as file:
    file.write(b"half")
    print("begun", flush=True)
    sys.stdin.read()
"""


def test_only_files_of_killed_writers_are_removed(tmp_path):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, MODULE, str(tmp_path / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in ("alive", "killed")
    ]
    for writer in writers:
        assert writer.stdout.readline() == b"begun\n"
    alive, killed = writers
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    write(tmp_path / "a", b"x")
    assert len(os.listdir(tmp_path)) == 2
    alive.communicate(b"")
    assert alive.returncode == 0 and (tmp_path / "alive").read_bytes() == b"half"
    assert sorted(os.listdir(tmp_path)) == ["a", "alive"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with atomic_file(tmp_path / "a") as file:
        file.write(b"first")
        write(tmp_path / "a", b"second")  # does not remove the other file
    assert (tmp_path / "a").read_bytes() == b"first" and os.listdir(tmp_path) == ["a"]


def test_other_files_with_a_temporary_name_do_not_block(tmp_path):
    os.mkfifo(tmp_path / ".dalijax-part-fifo")
    (tmp_path / "precious").write_bytes(b"x")
    (tmp_path / ".dalijax-part-link").symlink_to(tmp_path / "precious")
    (tmp_path / ".dalijax-part-folder").mkdir()
    write(tmp_path / "a", b"x")
    assert (tmp_path / "precious").read_bytes() == b"x" and (tmp_path / "a").exists()


def test_output_goes_to_pipes_and_through_links_of_the_user(tmp_path):
    command = "import runpy, sys; "
    command += "runpy.run_path(sys.argv[1])['write_output']('/dev/stdout', b'x' * 9)"
    result = subprocess.run(
        [sys.executable, "-c", command, MODULE], capture_output=True, check=True
    )
    assert result.stdout == b"x" * 9
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for content in (b"first", b"second"):
        write_output(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == content
