"""An HTTP server of byte ranges with latency and faults, in a thread or as a program.

It also answers S3's requests for lists of objects, if each folder is a bucket, and takes new files.

    python tests/support/range_server.py FOLDER PORT LATENCY [SHARE]

SHARE is the share of responses that are 503.

Faults are a function of the request: a `fault` gets the path, the range and the number of earlier
requests of this range, and returns the kind of a fault, or "" for a correct response. So the same
requests have the same faults in each run. The end of the range of a whole file is None.
"""

import asyncio
import bisect
import collections
import contextlib
import gzip
import hashlib
import html
import mmap
import os
import pathlib
import re
import sys
import threading
import urllib.parse
import weakref

STATUSES = ("400", "401", "403", "404", "412", "416", "429", "500", "503")
KINDS = (
    *STATUSES,
    "reset",  # closes the connection before the response
    "hang",  # never responds
    "stall",  # half of the body, then nothing
    "short",  # half of the body, then closes the connection
    "less",  # a correct response to a request for half of the range
    "norange",  # the whole file
    "other",  # the range after the requested one
    "cut",  # one byte less, with the headers of the whole range
    "long",  # further bytes, with the headers of the range
    "gzip",  # the compressed range, although the request asks for "identity"
    "chunked",  # without a Content-Length
    "unsized",  # without the size of the file in the Content-Range
    "garbled",  # a status line that is not HTTP
    "bare",  # a redirect without a Location
    "loop",  # a redirect to the same path
    "older",  # an older version of the file, unless the request has a condition
)


def share_of_requests(share, kinds=("503",), most=None, seed=0):
    """Returns a fault of a share of all requests; at most some of each range."""

    def fault(path, start, end, count):
        text = f"{seed} {path} {start} {end} {count}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        number = int.from_bytes(digest[:4], "big") / 2**32
        is_faulty = number < share and (most is None or count < most)
        return kinds[digest[4] % len(kinds)] if is_faulty else ""

    return fault


class RangeServer:
    """Serves the files of a folder.

    Args:
        folder: The folder.
        latency: Seconds before each response.

    Attributes:
        fault: Returns the fault of a request; None for no faults.
        tag: Replaces the ETags of all files, if it is not None; "" for no ETags.
        untagged: Paths of files without ETags.
        date: The Last-Modified of all files, if there is one.
        encoding: The Content-Encoding of all responses with files, if there is one.
        latency: As above.
        ranges: The requested ranges: path, start and end.
        requests: The target and the headers of each request, in lower case.
        redirects: The Location of redirected paths.
        lists: Prefixes of requests for pages of lists.
        can_list: Whether lists are allowed.
        list_fault: Returns whether a request for a page fails, given its number.
        page_size: The maximum number of objects on a page of a list.
        most_in_flight: The largest number of requests at once.
        num_faults: Number of responses with faults.
    """

    def __init__(self, folder, latency=0.0):
        self.folder, self.latency = pathlib.Path(folder), latency
        self.fault = None
        self.tag = self.date = self.encoding = None
        self.untagged, self.redirects = set(), {}
        self.ranges, self.lists, self.requests = [], [], []
        self.can_list, self.list_fault = True, lambda number: False
        self.page_size = 1000
        self.heads = 0
        self.in_flight = self.most_in_flight = self.num_faults = 0
        self.counts = collections.Counter()
        self._maps = {}
        self._keys = {}  # of buckets
        self.transports = weakref.WeakSet()  # of all connections

    def content(self, path):
        """Returns the bytes and the ETag of a file."""
        full = self.folder / path
        status = os.stat(full)
        key = (status.st_size, status.st_mtime_ns, status.st_ino)
        if self._maps.get(path, (None,))[0] != key:
            with open(full, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if key[0] else b""
            digest = hashlib.md5(repr(key).encode()).hexdigest()
            self._maps[path] = (key, memoryview(data), f'"{digest}"')
        _, data, tag = self._maps[path]
        if path in self.untagged:
            return data, ""
        return data, tag if self.tag is None else self.tag

    async def respond(self, reader, writer):
        """Responds to the requests of a connection."""
        self.transports.add(writer.transport)
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    size = re.search(r"\r\ncontent-length: *(\d+)", head.lower())
                    body = await reader.readexactly(int(size[1]) if size else 0)
                    await asyncio.sleep(self.latency)
                    is_open = await self._respond(head, body, writer)
                finally:
                    self.in_flight -= 1
                if not is_open:
                    break
            writer.close()
            return
        writer.transport.abort()  # without sending what remains

    def _page(self, bucket, query):
        """Returns a page of S3's ListObjectsV2: the objects of a bucket, sorted by their keys."""
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        self.lists.append(prefix)
        if not self.can_list:
            return 403, b"<Error><Code>AccessDenied</Code></Error>"
        if self.list_fault(len(self.lists)):
            return 503, b""
        if bucket not in self._keys:
            root = self.folder / bucket
            files = (path for path in root.rglob("*") if path.is_file())
            self._keys[bucket] = sorted(path.relative_to(root).as_posix() for path in files)
        keys = self._keys[bucket]
        first = bisect.bisect_right(keys, query.get("continuation-token", after))
        if not after and "continuation-token" not in query:
            first = 0
        keys = [key for key in keys[first:] if key.startswith(prefix)]
        folders = []
        if query.get("delimiter") == "/":
            ends = [key[len(prefix) :] for key in keys]
            folders = sorted({prefix + end.partition("/")[0] for end in ends if "/" in end})
            keys = [key for key, end in zip(keys, ends) if "/" not in end]
        page = keys[: min(int(query.get("max-keys", self.page_size)), self.page_size)]
        entries = "".join(
            f"<Contents><Key>{html.escape(key)}</Key><Size>{len(data)}</Size>"
            f"<ETag>{html.escape(tag)}</ETag><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            "</Contents>"
            for key in page
            for data, tag in [self.content(f"{bucket}/{key}")]
        )
        is_cut = len(page) < len(keys)
        entries += "".join(
            f"<CommonPrefixes><Prefix>{html.escape(name)}/</Prefix></CommonPrefixes>"
            for name in folders
        )
        last = html.escape(page[-1]) if is_cut else ""
        token = f"<NextContinuationToken>{last}</NextContinuationToken>" if is_cut else ""
        body = f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}{entries}"
        return 200, f"<ListBucketResult>{body}</ListBucketResult>".encode()

    async def _respond(self, head, body, writer):
        """Responds to a request; returns whether the connection stays open."""
        method, target, _ = head.partition("\r\n")[0].split(" ")
        headers = dict(re.findall(r"\r\n([^:\r]+): *([^\r]*)", head.lower()))
        self.requests.append((target.lower(), headers))
        path = urllib.parse.unquote(target.partition("?")[0]).lstrip("/")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        query = dict(urllib.parse.parse_qsl(target.partition("?")[2]))
        if path in self.redirects:
            return self._send(writer, 302, b"", f"Location: {self.redirects[path]}\r\n")
        if query.get("list-type") == "2":
            return self._send(writer, *self._page(path.rstrip("/"), query))
        if method == "PUT":
            (self.folder / path).write_bytes(body)
            self._keys.clear()
            return self._send(writer, 200, b"", f"ETag: {self.content(path)[1]}\r\n")
        kind = ""
        if method == "HEAD":
            self.heads += 1
        else:
            key = (path, int(wanted[1]), int(wanted[2]) + 1) if wanted else (path, 0, None)
            if self.fault is not None:
                kind = self.fault(*key, self.counts[key])
                self.num_faults += bool(kind)
            self.counts[key] += 1
            self.ranges.append(key)
        if kind == "reset":
            writer.transport.abort()
            return False
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind in STATUSES:
            return self._send(writer, int(kind), b"fault")
        if kind in ("bare", "loop"):
            return self._send(writer, 302, b"", f"Location: {target}\r\n" * (kind == "loop"))
        if kind == "garbled":
            writer.write(b"HTTP/1.1 what\r\n\r\n")
            return False
        try:
            data, tag = self.content(path)
        except OSError:
            return self._send(writer, 404, b"")
        if kind == "older" and "if-match" not in headers:
            data, tag = bytes(255 - byte for byte in data), '"older"'
        if tag and headers.get("if-match", tag.lower()) != tag.lower():
            return self._send(writer, 412, b"")
        lines = f"ETag: {tag}\r\n" if tag else ""
        lines += f"Last-Modified: {self.date}\r\n" if self.date else ""
        lines += f"Content-Encoding: {self.encoding}\r\n" if self.encoding is not None else ""
        if not wanted or kind == "norange":
            status, body = 200, data
        else:
            status, start, end = 206, int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            if start >= len(data):
                return self._send(writer, 416, b"")
            if kind == "less":
                end = start + (end - start) // 2
            if kind == "other":
                start, end = start + 1, end + 1
            size = "*" if kind == "unsized" else len(data)
            lines += f"Content-Range: bytes {start}-{end - 1}/{size}\r\n"
            body = data[start : end - (kind == "cut")]
        if kind == "long":
            body = bytes(body) + b"x" * 20
        if kind == "gzip":
            body, lines = gzip.compress(body), lines + "Content-Encoding: gzip\r\n"
        if kind in ("short", "stall"):
            self._send(writer, status, body[: len(body) // 2], lines, length=len(body))
            await writer.drain()
            if kind == "stall":
                await asyncio.sleep(3600)
            return False
        if kind == "chunked":
            head = f"HTTP/1.1 {status} x\r\nTransfer-Encoding: chunked\r\n{lines}\r\n"
            chunk = b"%x\r\n%b\r\n" % (len(body), body)
            writer.write(head.encode() + chunk + b"0\r\n\r\n")
            return True
        return self._send(writer, status, body, lines, method == "HEAD")

    def _send(self, writer, status, body, lines="", is_head=False, length=None):
        length = len(body) if length is None else length
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {length}\r\n{lines}\r\n"
        writer.write(head.encode())
        if not is_head:
            writer.write(body)
        return True


@contextlib.contextmanager
def serving(folder, latency=0.0, kind=RangeServer):
    """Serves a folder by a thread; yields the URL and the server."""
    server = kind(folder, latency)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    address = []

    async def run():
        listener = await asyncio.start_server(server.respond, "127.0.0.1", 0, backlog=4096)
        address.extend(listener.sockets[0].getsockname())
        server.stop = asyncio.Event()
        started.set()
        await server.stop.wait()
        # A server that is closed while it accepts a connection leaves its socket open.
        for sock in listener.sockets:
            loop.remove_reader(sock.fileno())
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                coroutine = task.get_coro()
                # Other tasks accept connections, whose sockets would stay open.
                if coroutine.__name__ == "respond" and coroutine.cr_await is not None:
                    task.cancel()
            await asyncio.sleep(0)
        listener.close()
        for transport in list(server.transports):
            transport.abort()  # also those that have closed, but not sent everything
        for _ in range(3):  # which close the connections
            await asyncio.sleep(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{address[1]}", server
    finally:
        loop.call_soon_threadsafe(server.stop.set)
        thread.join()
        loop.close()


async def serve(folder, port, latency, share=0.0):
    """Serves a folder until the program ends, with a share of 503s."""
    server = RangeServer(folder, latency)
    server.fault = share_of_requests(share)
    listener = await asyncio.start_server(server.respond, "127.0.0.1", port, backlog=4096)
    await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])))
