"""`Storage`: access to remote files by their URLs, with the user's options."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages.redacted_errors import without_secrets
from ..threads.workers import Result
from .cache_folder import CacheFolder, open_cache
from .folders import Folders, FsspecFolders, ObjectFolders
from .fsspec_client import filesystem, read_files
from .listing import listings_of
from .locations import Location, check_options, folder_location_of, location_of
from .native import obstore
from .object_client import ObjectClient
from .ranges import byte_count
from .request_threads import request_threads
from .versions import Version

_log = logging.getLogger("dalijax")


class Storage:
    """Reads and writes remote files, and lists their folders.

    obstore reads http, s3, gs and az URLs. fsspec reads chained URLs and other protocols, and lists
    folders of HTTP servers.

    Args:
        options: The user's storage options, which both obstore and fsspec get.
        cache: The local folder that stores ranges of remote files; None: ranges are not stored.
        read_ahead: Number of bytes of remote files that a source requests before they are needed.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        cache: CacheFolder | None = None,
        read_ahead: int = 0,
    ):
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"storage_options must be a dict, not {type(options).__name__}")
        self.options = dict(options or {})
        self.cache = cache
        self.read_ahead = read_ahead
        self.client = ObjectClient(self.options)
        self._checked: set[str] = set()  # kinds of stores that accept the options
        # Versions of objects that a pattern has matched, until a method returns the versions.
        self._found: dict[Location, Version] = {}

    def __reduce__(self) -> Any:
        return Storage, (self.options, self.cache, self.read_ahead)

    def __repr__(self) -> str:
        return f"Storage({', '.join(sorted(self.options))})"  # values may be secret

    def location(self, url: str) -> Location | None:
        """Returns a URL's location for obstore (kind of store, bucket or host, and path in it).

        The result is None if fsspec reads the URL.

        Raises:
            ValueError: If obstore can't read the URL, or stores of this kind do not accept one of
                the storage options.
            ImportError: If obstore reads the URL, and is not installed.
        """
        location = location_of(url)
        if location is not None:
            self._check(location.kind)
        return location

    def _check(self, kind: str) -> None:
        """Checks the storage options of a kind of stores, and that obstore is installed."""
        if kind not in self._checked:  # once, as there may be thousands of URLs of a kind
            check_options(kind, self.options)
            obstore()
            self._checked.add(kind)

    def folders(self, url: str) -> tuple[Folders, str]:
        """Returns an object that lists folders of a URL's bucket or host, and the path in it.

        Raises:
            ValueError: If obstore can't list the URL, or stores of this kind do not accept one of
                the storage options.
            ImportError: If a package that lists the URL is not installed.
        """
        location = folder_location_of(url)
        if location is None:
            self.location(url)  # the files of an HTTP server are read by obstore
            folders = FsspecFolders(url, self.options)
            return folders, folders.path(url)
        self._check(location.kind)
        return ObjectFolders(self.client, url, location, self._found), location.key

    def contents(
        self, urls: Sequence[str], opens: bool = False, most_bytes: int | None = None
    ) -> list[Any]:
        """Requests the contents of files at once, and returns them as bytes or memoryviews.

        Args:
            urls: The URLs of the files.
            opens: Whether a source is being opened. Retries then end earlier; see `patience`.
            most_bytes: The number of bytes to read of a larger file; None: all. A result has all
                bytes if its server ignores ranges.

        Raises:
            OSError: If a file can't be read.
        """
        threads = request_threads()
        locations = [self.location(url) for url in urls]
        others = [url for url, location in zip(urls, locations) if location is None]
        result = (
            threads.call(read_files, others, self.options, opens, most_bytes) if others else None
        )
        results = [
            None
            if location is None
            else threads.call(self.client.content, location, url, opens, most_bytes)
            for url, location in zip(urls, locations, strict=True)
        ]
        rest = iter(() if result is None else result.get())
        return [next(rest) if result is None else result.get() for result in results]

    def versions(self, locations: Sequence[Location], urls: Sequence[str]) -> list[Version]:
        """Returns the versions of objects, in the order of the URLs.

        Versions that were just listed to expand a pattern are returned once without a request.
        Listings are requested for the others, and objects that are in no listing are then requested
        at once.

        Args:
            locations: The location of each object.
            urls: The URL of each object.

        Raises:
            OSError: If an object can't be read.
        """
        threads = request_threads()
        listed = self._listed(locations, urls)
        results = [
            None if location in listed else threads.call(self.client.version, location, url)
            for location, url in zip(locations, urls, strict=True)
        ]
        return [
            listed[location] if result is None else result.get()
            for location, result in zip(locations, results, strict=True)
        ]

    def listed_versions(self, urls: Sequence[str]) -> list[Version] | None:
        """Returns the versions of objects from listings, without a request for each object.

        Returns None if fsspec reads one of the URLs, or the listings lack one of the objects.
        """
        locations = [location for url in urls if (location := self.location(url)) is not None]
        listed = self._listed(locations, urls) if len(locations) == len(urls) else {}
        self._found.clear()
        versions = [listed[location] for location in locations if location in listed]
        return versions if len(versions) == len(urls) else None

    def _listed(
        self, locations: Sequence[Location], urls: Sequence[str]
    ) -> dict[Location, Version]:
        """Returns the versions of the objects that listings contain, by location.

        Uses the listings that expanded patterns, and then requests listings of the other objects.
        """
        roots: dict[tuple[str, str, str], dict[str, tuple[Location, str]]] = {}
        versions = {at: self._found.pop(at) for at in {*locations} if at in self._found}
        for location, url in zip(locations, urls, strict=True):
            if location not in versions:
                root = (location.kind, location.root, location.account)
                roots.setdefault(root, {})[location.key] = (location, url)
        results = []
        for objects in roots.values():
            location, url = next(iter(objects.values()))
            for listing in listings_of(location.kind, objects.keys()):
                call = request_threads().call(self.client.listed, location, url, listing)
                results.append((objects, call))
        for objects, result in results:
            try:
                found = result.get()
            except OSError as error:  # e.g. the user may read objects, but not list them
                _log.debug("a bucket can't be listed, so that each object is requested: %s", error)
                continue
            versions |= {objects[key][0]: version for key, version in found.items()}
        return versions

    def write(self, url: str, content: bytes) -> None:
        """Writes a remote file, and replaces an existing file.

        Raises:
            OSError: If the file can't be written.
        """
        location = self.location(url)
        if location is not None:
            request_threads().call(self.client.write, location, url, content).get()
            return
        with without_secrets([url], self.options):
            system, path = filesystem(url, self.options)
            system.pipe_file(path, content)

    def request(
        self, location: Location, url: str, start: int, end: int, version: Version
    ) -> Result[list[memoryview]]:
        """Requests a range of an object; returns the future response, a list of one memoryview.

        ``get()`` of the result raises OSError if the range can't be read, or the object has another
        version.

        Args:
            location: The location of the object.
            url: The URL of the object.
            start: The first byte.
            end: The byte after the last byte.
            version: The version that the object must have.
        """
        return request_threads().call(self.client.read, location, url, [start], [end], version)


def open_storage(
    options: Mapping[str, Any] | None,
    read_ahead: int | float | str,
    cache: Any,
    cache_bytes: int | float | str | None,
) -> Storage:
    """Returns access to the remote files of a source, given the user's arguments.

    Args:
        options: The user's ``storage_options=``.
        read_ahead: The user's ``read_ahead=``, such as ``"128MB"``.
        cache: The user's ``cache=``; see `open_cache`.
        cache_bytes: The user's ``cache_bytes=``.

    Raises:
        TypeError: If ``options`` are not a dict.
        ValueError: If ``read_ahead`` or ``cache_bytes`` is not a number of bytes, or the folder
            can't be a cache.
        OSError: If the folder of the cache can't be created.
    """
    ahead = byte_count(read_ahead, "read_ahead")
    return Storage(options, open_cache(cache, cache_bytes), ahead)
