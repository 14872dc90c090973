"""`Storage`: access to remote files by their URLs, with the user's options."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages.redacted_errors import without_secrets
from ..workers import Result
from .cache_folder import CacheFolder, open_cache
from .folders import Folders, FsspecFolders, ObjectFolders
from .fsspec_client import filesystem, read_files
from .listing import listings_of
from .locations import Place, check_options, folder_place_of, place_of
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
        self._found: dict[Place, Version] = {}

    def __reduce__(self) -> Any:
        return Storage, (self.options, self.cache, self.read_ahead)

    def __repr__(self) -> str:
        return f"Storage({', '.join(sorted(self.options))})"  # values may be secret

    def place(self, url: str) -> Place | None:
        """Returns the `Place` of a URL for obstore (kind of store, bucket or host, and path in it).

        The result is None if fsspec reads the URL.

        Raises:
            ValueError: If obstore can't read the URL, or stores of this kind do not accept one of
                the storage options.
            ImportError: If obstore reads the URL, and is not installed.
        """
        place = place_of(url)
        if place is not None:
            self._check(place.kind)
        return place

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
        place = folder_place_of(url)
        if place is None:
            self.place(url)  # the files of an HTTP server are read by obstore
            folders = FsspecFolders(url, self.options)
            return folders, folders.path(url)
        self._check(place.kind)
        return ObjectFolders(self.client, url, place, self._found), place.key

    def contents(self, urls: Sequence[str], opens: bool = False) -> list[Any]:
        """Requests the contents of files at once, and returns them as bytes or memoryviews.

        Args:
            urls: The URLs of the files.
            opens: Whether a source is being opened. Retries then end earlier; see `patience`.

        Raises:
            OSError: If a file can't be read.
        """
        threads = request_threads()
        places = [self.place(url) for url in urls]
        others = [url for url, place in zip(urls, places) if place is None]
        result = threads.call(read_files, others, self.options, opens) if others else None
        results = [
            None if place is None else threads.call(self.client.content, place, url, opens)
            for url, place in zip(urls, places, strict=True)
        ]
        rest = iter(() if result is None else result.get())
        return [next(rest) if result is None else result.get() for result in results]

    def versions(self, places: Sequence[Place], urls: Sequence[str]) -> list[Version]:
        """Returns the versions of objects, in the order of the URLs.

        Versions that were just listed to expand a pattern are returned once without a request.
        Listings are requested for the others, and objects that are in no listing are then requested
        at once.

        Args:
            places: The place of each object.
            urls: The URL of each object.

        Raises:
            OSError: If an object can't be read.
        """
        threads = request_threads()
        listed = self._listed(places, urls)
        results = [
            None if place in listed else threads.call(self.client.version, place, url)
            for place, url in zip(places, urls, strict=True)
        ]
        return [
            listed[place] if result is None else result.get()
            for place, result in zip(places, results, strict=True)
        ]

    def listed_versions(self, urls: Sequence[str]) -> list[Version] | None:
        """Returns the versions of objects from listings, without a request for each object.

        Returns None if fsspec reads one of the URLs, or the listings lack one of the objects.
        """
        places = [place for url in urls if (place := self.place(url)) is not None]
        listed = self._listed(places, urls) if len(places) == len(urls) else {}
        self._found.clear()
        versions = [listed[place] for place in places if place in listed]
        return versions if len(versions) == len(urls) else None

    def _listed(self, places: Sequence[Place], urls: Sequence[str]) -> dict[Place, Version]:
        """Returns the versions of the objects that listings contain, by place.

        Uses the listings that expanded patterns, and then requests listings of the other objects.
        """
        roots: dict[tuple[str, str, str], dict[str, tuple[Place, str]]] = {}
        versions = {place: self._found.pop(place) for place in {*places} if place in self._found}
        for place, url in zip(places, urls, strict=True):
            if place not in versions:
                root = (place.kind, place.root, place.account)
                roots.setdefault(root, {})[place.key] = (place, url)
        results = []
        for objects in roots.values():
            place, url = next(iter(objects.values()))
            for listing in listings_of(place.kind, objects.keys()):
                call = request_threads().call(self.client.listed, place, url, listing)
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
        place = self.place(url)
        if place is not None:
            request_threads().call(self.client.write, place, url, content).get()
            return
        with without_secrets([url], self.options):
            system, path = filesystem(url, self.options)
            system.pipe_file(path, content)

    def request(
        self, place: Place, url: str, start: int, end: int, version: Version
    ) -> Result[list[memoryview]]:
        """Requests a range of an object; returns the future response, a list of one memoryview.

        ``get()`` of the result raises OSError if the range can't be read, or the object has another
        version.

        Args:
            place: The place of the object.
            url: The URL of the object.
            start: The first byte.
            end: The byte after the last byte.
            version: The version that the object must have.
        """
        return request_threads().call(self.client.read, place, url, [start], [end], version)


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
