"""`BufferedReader`: reads headers and small values of a file, mostly at increasing offsets."""

from __future__ import annotations

import collections

from ..threads.workers import Result
from .byte_files import ByteFile, LocalFile, ObjectFile, RemoteFile

SMALL_BUFFER = 2048  # bytes; the buffer of readers that read only a few headers
_SMALLEST = 64  # the first buffer after skipped bytes has 1/64 of the size of other buffers


class BufferedReader:
    """Reads a file buffer by buffer, so that most reads are served from memory.

    If reads follow one another, the next buffers of a remote file are requested before they are
    needed. If a read skips more than a buffer, the values between the headers are large, so the
    next buffers are small at first.

    Args:
        file: The file.
        buffer_size: Size of a buffer in bytes; None: ``file.buffer_size``. Larger reads are not
            split.
        ahead: Largest number of buffers of a remote file that are requested ahead.

    Attributes:
        file: The file.
    """

    def __init__(self, file: ByteFile, buffer_size: int | None = None, ahead: int = 0):
        self.file = file
        self._buffer_size = file.buffer_size if buffer_size is None else buffer_size
        self._data = b""
        self._start = 0
        self._before = 0, b""  # the offset and the bytes of the buffer before ``_data``
        self._size = self._buffer_size  # bytes of the next buffer
        self._most_ahead, self._ahead = ahead, 1
        # The requested buffers after ``_data``.
        self._pending = collections.deque[Result[list[memoryview]]]()
        self._requested = 0  # the end offset of the requested buffers

    def __call__(self, at: int, count: int) -> bytes:
        """Returns ``count`` bytes from the offset ``at``; fewer at the end of the file."""
        begin = at - self._start
        if begin >= 0 and begin + count <= len(self._data):
            return self._data[begin : begin + count]
        if isinstance(self.file, LocalFile) or not self._most_ahead:
            self._data = self.file.read(at, max(count, self._buffer_size))
        elif begin < 0:  # a value that is read after the next header
            start, data = self._before
            begin = at - start
            if begin >= 0 and begin + count <= len(data):
                return data[begin : begin + count]
            return self.file.read(at, count)
        else:
            before = self._start, self._data
            try:
                self._data = self._read_ahead(self.file, at, count)
            except BaseException:  # some buffers are lost; the next call requests them again
                self._pending.clear()
                self._requested = self._start + len(self._data)
                raise
            self._before = before
        self._start = at
        return self._data[:count]

    def buffered(self, at: int, count: int) -> tuple[bytes, int]:
        """Returns the buffered bytes around a range, and the offset of the first of these bytes.

        Reads the range if it is not in the buffer. Callers parse many values from the result,
        without a call for each value.

        Args:
            at: Offset of the range in the file.
            count: Size of the range in bytes. The range may exceed the file.
        """
        begin = at - self._start
        if begin < 0 or begin + count > len(self._data):
            found = self(at, count)
            if at != self._start:
                return found, at
        return self._data, self._start

    def forget(self) -> None:
        """Frees the buffers, so that the next read may begin at an earlier offset."""
        self._data, self._start, self._before = b"", 0, (0, b"")
        self._pending.clear()
        self._requested = 0

    def _read_ahead(self, file: RemoteFile | ObjectFile, at: int, count: int) -> bytes:
        """Returns ``count`` bytes from the offset ``at``, and requests the buffers after them."""
        end = self._start + len(self._data)
        if not self._data or at > self._requested + self._buffer_size:
            self._size = self._buffer_size // (_SMALLEST if self._data else 1)
            self._pending.clear()
            data = file.read(at, max(count, self._size))
            self._requested, self._ahead = at + len(data), 1
            return data
        if at > self._requested:
            self._pending.clear()
            end = self._requested = at
        pieces = [self._data[at - self._start :]]
        while end < min(at + count, file.size):
            self._request(file)
            (piece,) = self._pending.popleft().get()
            pieces.append(bytes(piece[max(0, at - end) :]))
            end += len(piece)
        self._request(file)
        return b"".join(pieces)

    def _request(self, file: RemoteFile | ObjectFile) -> None:
        """Requests buffers until ``_ahead`` buffers are pending.

        Each call doubles the size of later buffers, up to the size of a buffer. Further calls
        double the number of pending buffers.
        """
        while len(self._pending) < self._ahead and self._requested < file.size:
            self._pending.append(file.request(self._requested, self._size))
            self._requested = min(self._requested + self._size, file.size)
        if self._size < self._buffer_size:
            self._size = min(2 * self._size, self._buffer_size)
        else:
            self._ahead = min(2 * self._ahead, self._most_ahead)
