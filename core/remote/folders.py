"""Lists folders of remote files, expands patterns, and reads whole files.

`FsspecFolders` and `ObjectFolders` have the methods ``isdir``, ``isfile``, ``ls``, ``glob`` and
``unstrip_protocol`` of fsspec's file systems, and ``read``. An entry of a folder is a dict with at
least the keys "name" and "type".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..threads.per_process import PerProcess
from ..threads.workers import Result
from .fsspec_client import filesystem, read_together
from .locations import Location
from .object_client import ObjectClient
from .request_threads import request_threads
from .retries import MissingError, patience, patiently, repeated
from .versions import Version

T = TypeVar("T")
Entry = dict[str, str]  # "name", and "type": "file" or "directory"
MOST_KEPT = 200_000  # files whose versions are kept; each takes 0.6 kB of memory
_Listed = tuple[list[str], dict[str, Version]]  # paths of folders, and versions of objects by key


class FsspecFolders:
    """Lists and reads the folders of one of fsspec's file systems.

    Args:
        url: Any URL of the file system.
        options: The user's storage options.
    """

    def __init__(self, url: str, options: Mapping[str, Any]):
        self._url, self._options = url, dict(options)
        # Some file systems do not work in a forked child.
        self._system_of_process = PerProcess(lambda: filesystem(url, options)[0], keeps=True)
        self._system_of_process.get()  # raises an error if a package is missing

    def __reduce__(self) -> Any:
        return FsspecFolders, (self._url, self._options)

    @property
    def _system(self) -> Any:
        return self._system_of_process.get()

    def path(self, url: str) -> str:
        """Returns the path of a URL in the file system."""
        return filesystem(url, self._options)[1]

    def unstrip_protocol(self, path: str) -> str:
        """Returns the URL of a path."""
        return str(self._system.unstrip_protocol(path))

    def isdir(self, path: str) -> bool:
        """Returns whether a path is a folder."""
        return bool(self._patiently(lambda: self._system.isdir(path)))

    def isfile(self, path: str) -> bool:
        """Returns whether a path is a file."""
        return bool(self._patiently(lambda: self._system.isfile(path)))

    def ls(self, path: str) -> list[Entry]:
        """Returns the entries of the files and folders in a folder."""
        entries: list[Entry] = self._patiently(lambda: self._system.ls(path, detail=True))
        return entries

    def glob(self, pattern: str) -> list[Entry]:
        """Returns the entries that match a pattern, which may also be the path of a file."""
        if self.isfile(pattern):
            return [{"name": pattern, "type": "file"}]
        found = self._patiently(lambda: self._system.glob(pattern, detail=True))
        return list(found.values())

    def read(self, paths: Sequence[str], most_bytes: int | None = None) -> list[Any]:
        """Returns the contents of the files with the given paths; see `read_files`."""

        def attempt(rows: list[int]) -> list[Any]:
            starts, ends = [None] * len(rows), [most_bytes] * len(rows)
            return read_together(self._system, [paths[row] for row in rows], starts, ends)

        urls = [self.unstrip_protocol(path) for path in paths]
        return repeated(attempt, urls, patience(self._options), options=self._options)

    def _patiently(self, call: Callable[[], T]) -> T:
        return patiently(call, self._url, self._options, opens=True)


class ObjectFolders:
    """Lists and reads the folders of a bucket by obstore; paths are keys of objects.

    Args:
        client: Reads and lists the objects.
        url: A URL in the bucket.
        location: The location of this URL.
        versions: A dict to which the versions of listed objects are added, by location.
    """

    def __init__(
        self, client: ObjectClient, url: str, location: Location, versions: dict[Location, Version]
    ):
        self._client, self._location, self._url = client, location, url
        self._versions = versions
        end = url.rstrip("/").removesuffix(location.key)
        self._root = end if end.endswith("/") else end + "/"
        self._listed: dict[str, Result[_Listed]] = {}  # listings requested ahead, by path

    def __reduce__(self) -> Any:
        return ObjectFolders, (self._client, self._url, self._location, {})

    def unstrip_protocol(self, path: str) -> str:
        """Returns the URL of a path."""
        return self._root + path

    def isdir(self, path: str) -> bool:
        """Returns whether a path is a folder: it contains at least one object or folder."""
        self._listed[path] = result = self._list(path)
        return any(result.get())

    def isfile(self, path: str) -> bool:
        """Returns whether a path is a file."""
        if not path:
            return False
        url = self.unstrip_protocol(path)
        try:
            request_threads().call(self._client.version, self._location.at(path), url).get()
        except MissingError:
            return False
        return True

    def ls(self, path: str) -> list[Entry]:
        """Returns the entries of a folder, and requests the listings of its subfolders ahead."""
        path = path.strip("/")
        names, versions = (self._listed.pop(path, None) or self._list(path)).get()
        self._keep(versions)
        for name in names:
            self._listed[name] = self._list(name)
        folders = [{"name": name, "type": "directory"} for name in names]
        return folders + [{"name": key, "type": "file"} for key in versions]

    def _list(self, path: str) -> Result[_Listed]:
        """Requests a folder's listing; returns its future subfolders, and versions of objects."""
        url = self.unstrip_protocol(path)
        return request_threads().call(self._client.entries, self._location.at(path), url)

    def glob(self, pattern: str) -> list[Entry]:
        """Returns the entries that match a pattern, which may also be the key of an object."""
        fixed = re.split(r"[*\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
        location, url = self._location.at(fixed), self.unstrip_protocol(fixed)
        end = pattern[len(fixed) :].lstrip("/")
        if "/" in end or "**" in end:
            objects = request_threads().call(self._client.objects_below, location, url).get()
        else:
            _, objects = self._list(fixed).get()
        matches = pattern.__eq__ if pattern in objects else _matcher(pattern).fullmatch
        matching = {key: version for key, version in objects.items() if matches(key)}
        self._keep(matching)
        return [{"name": key, "type": "file"} for key in matching]

    def _keep(self, versions: Mapping[str, Version]) -> None:
        """Keeps the versions of objects for `Storage.versions`, unless there are too many."""
        if len(self._versions) + len(versions) <= MOST_KEPT:
            location = self._location
            self._versions.update((location.at(key), version) for key, version in versions.items())

    def read(self, paths: Sequence[str], most_bytes: int | None = None) -> list[Any]:
        """Returns the contents of the objects with the given keys; see `ObjectClient.content`."""
        content, locate, url_of = self._client.content, self._location.at, self.unstrip_protocol
        threads = request_threads()
        results = [
            threads.call(content, locate(path), url_of(path), False, most_bytes) for path in paths
        ]
        return [result.get() for result in results]


Folders = FsspecFolders | ObjectFolders


def _matcher(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression for a pattern with ``*``, ``**`` and ``[]``."""
    parts = []
    for part in re.split(r"(\*\*/|\*\*|\*|\[[^]]+\])", pattern):
        if part.startswith("[") and part.endswith("]"):
            parts.append("[" + part[1:].replace("\\", r"\\").replace("!", "^", part[1] == "!"))
        else:
            special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
            parts.append(special.get(part) or re.escape(part))
    return re.compile("".join(parts), re.DOTALL)
