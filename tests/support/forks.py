"""Runs programs in forks of a process that has imported the libraries.

A new process imports JAX and DALI for two seconds, and TensorFlow for five more. The workers of
xdist share one that forks. A fork begins before any device, thread or pipeline exists. It waits for
its threads and calls the functions of `atexit` like a program. Then it exits without freeing its
modules, which takes half a second.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Sequence
from typing import IO, Any

MODULES = ("jax.numpy", "numpy", "nvidia.dali.fn", "dalijax", "PIL.Image")
# Options of JAX that tests set for their programs.
OPTIONS = {"jax_platforms": str, "jax_num_cpu_devices": int}
FOLDER = "DALIJAX_FORKS"  # variable: the folder of the sockets that xdist's workers share
_HAS_ENDED = threading.Event()  # of the program of this fork, without an error


@functools.cache
def _server(number: int) -> IO[str]:
    """Connects to a process that imports the libraries, and starts it before, if necessary."""
    folder = pathlib.Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="forks"))
    path = folder / str(number)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _connect(path)
        if connection is None:
            path.unlink(missing_ok=True)
            os.posix_spawn(
                sys.executable,
                # JAX and Python warn of forks.
                [sys.executable, "-W", "ignore", __file__, str(path)],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1)],
                setpgroup=0,  # Ctrl-C in a terminal ends only the tests
            )
        deadline = time.monotonic() + 120
        while connection is None:
            assert time.monotonic() < deadline, "the process of forks does not start"
            time.sleep(0.02)
            connection = _connect(path)
    with connection:  # closed with the file
        return connection.makefile("rw")


def _connect(path: pathlib.Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


class Fork:
    """A program in a fork.

    Args:
        program: Path of the program, or its code, of several lines.
        *arguments: Its arguments.
        modules: Modules that are imported before the fork, besides `MODULES`.
        env: Its environment variables.
        cwd: Its folder.
        number: Forks of different numbers have different addresses and hash seeds.
        warn: What happens with its warnings, as in ``python -W``.
        piped: Whether ``stdin`` and ``stdout`` are pipes instead of files.
        frees: Whether the program frees its modules when it exits, like other programs.
    """

    def __init__(
        self,
        program: Any,
        *arguments: Any,
        modules: Sequence[str] = (),
        env: dict[str, str] | None = None,
        cwd: Any = None,
        number: int = 0,
        warn: str = "ignore",
        piped: bool = False,
        frees: bool = False,
    ) -> None:
        self._number = number
        self._folder = tempfile.TemporaryDirectory()
        files = [pathlib.Path(self._folder.name, name) for name in ("in", "out", "err")]
        self._files = files[1:]
        if piped:
            for file in files[:2]:
                os.mkfifo(file)
        if "\n" in str(program):
            code = pathlib.Path(self._folder.name, "program.py")
            code.write_text(str(program))
            program = code
        self._pid = self._ask(
            program=str(program),
            arguments=list(map(str, arguments)),
            modules=[*MODULES, *modules],
            env=dict(os.environ if env is None else env),
            cwd=str(cwd or os.getcwd()),
            files=[str(files[0]) if piped else os.devnull, *map(str, self._files)],
            warn=warn,
            frees=frees,
        )
        # The fork opens its pipes in the same order, and each open() waits for the other end.
        self.stdin = files[0].open("w") if piped else None
        self.stdout = files[1].open(errors="replace") if piped else None

    def kill(self) -> None:
        """Kills the program like ``kill -9``, unless it has ended; `result` must follow."""
        os.kill(self._pid, signal.SIGKILL)  # its number is its own until `result` waits for it

    def result(self, timeout: float) -> tuple[int | None, str, str]:
        """Returns the exit code (None if it ran longer and was killed), stdout and stderr.

        Closes the pipes; lines that were read from ``stdout`` are not repeated.
        """
        if self.stdin is None or self.stdout is None:
            code = self._ask(pid=self._pid, timeout=timeout)
            out = self._files[0].read_text(errors="replace")
        else:
            self.stdin.close()
            timer = threading.Timer(timeout, self.kill)
            timer.start()
            with self.stdout as pipe:
                out = pipe.read()
            timer.cancel()
            code = self._ask(pid=self._pid, timeout=timeout)
        err = self._files[1].read_text(errors="replace")
        self._folder.cleanup()
        return code, out, err

    def _ask(self, **request: Any) -> Any:
        server = _server(self._number)
        server.write(json.dumps(request) + "\n")
        server.flush()
        return json.loads(server.readline())


def run_fork(
    program: Any, *arguments: Any, code: int = 0, timeout: float = 300, **options: Any
) -> types.SimpleNamespace:
    """Runs a program until it exits, like `programs.run_python`."""
    got, out, err = Fork(program, *arguments, **options).result(timeout)
    assert got == code, f"{got}: " + out[-2000:] + err[-4000:]
    return types.SimpleNamespace(stdout=out, stderr=err)


def _serve(path: str) -> dict[str, Any] | None:
    """Answers requests; returns the request of a fork in the fork.

    Returns None after all processes that send requests have ended.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.settimeout(120)  # ends if the process that started this one was killed
    clients = {listener.accept()[0]: (0, 0.0)}  # the fork whose end it waits for, and a deadline
    while clients:
        waits = any(pid for pid, _ in clients.values())
        ready, _, _ = select.select([listener, *clients], [], [], 0.02 if waits else None)
        for client in ready:
            if client is listener:
                clients[listener.accept()[0]] = (0, 0.0)
            elif not (line := _read_line(client)):
                del clients[client]
                client.close()
            elif "pid" in (request := json.loads(line)):
                clients[client] = request["pid"], time.monotonic() + request["timeout"]
            else:
                _import(request["modules"])
                pid = os.fork()
                if pid == 0:
                    for own in (listener, *clients):
                        own.close()
                    return request
                _answer(client, pid)
        for client, (pid, deadline) in clients.items():
            if pid:
                has_ended, code = _exit_code(pid, deadline)
                if has_ended:
                    clients[client] = (0, 0.0)
                    _answer(client, code)
    return None


def _read_line(client: socket.socket) -> bytes:
    """Returns a request, or nothing after the process that sends requests has ended."""
    data = b""
    while not data.endswith(b"\n"):
        part = client.recv(1 << 16)
        if not part:
            return b""
        data += part
    return data


def _answer(client: socket.socket, answer: int | None) -> None:
    with contextlib.suppress(BrokenPipeError):  # the process that asked was killed
        client.sendall(json.dumps(answer).encode() + b"\n")


def _import(modules: list[str]) -> None:
    if not set(modules) <= sys.modules.keys():
        gc.disable()
        for name in modules:
            importlib.import_module(name)
        gc.enable()
        gc.collect()
        gc.freeze()  # collections in forks would visit, and copy, a million objects


def _exit_code(pid: int, deadline: float) -> tuple[bool, int | None]:
    """Returns whether a fork has ended, and its exit code; None if it is killed now."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        return True, os.waitstatus_to_exitcode(status)
    if time.monotonic() < deadline:
        return False, None
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True, None


def _become(request: dict[str, Any]) -> None:
    """Runs the program of a request in this process, like a new process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores SIGINT
    for number, path in enumerate(request["files"]):
        with open(path, "wb" if number else "rb") as file:
            os.dup2(file.fileno(), number)
    warnings.simplefilter(request["warn"])  # type: ignore[arg-type]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _read_options_of_jax()
    program = request["program"]
    sys.argv[:] = [program, *request["arguments"]]
    sys.path[0] = str(pathlib.Path(program).resolve().parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    main = types.ModuleType("__main__")
    main.__file__ = program
    sys.modules["__main__"] = main
    code = compile(pathlib.Path(program).read_text(), program, "exec", dont_inherit=True)
    try:
        exec(code, main.__dict__)  # noqa: S102 - what this file is for
    except SystemExit as error:
        if error.code:
            raise
    if not request["frees"]:
        _HAS_ENDED.set()


def _exit_quickly() -> None:
    """Exits without freeing the modules, if a program has ended without an error."""
    if _HAS_ENDED.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _read_options_of_jax() -> None:
    """Applies the environment variables that JAX read when it was imported."""
    import jax

    for option, kind in OPTIONS.items():
        if option.upper() in os.environ:
            jax.config.update(option, kind(os.environ[option.upper()]))


if __name__ == "__main__":
    atexit.register(_exit_quickly)  # before all other functions, so that it is called last
    if (request := _serve(sys.argv[1])) is not None:
        _become(request)
