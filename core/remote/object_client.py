"""`ObjectClient`: reads and writes objects of HTTP servers, S3, GCS and Azure by obstore."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..environment.passing_errors import is_environment
from ..messages.printable import printable
from ..threads.per_process import PerProcess
from .listing import PAGE, SORTED, Listing, versions_of_page
from .locations import Location, needs_boto3, store_arguments
from .native import obstore
from .redirects import check_redirects
from .retries import (
    WrongAnswerError,
    changed,
    each,
    misconfigured,
    patience,
    patiently,
    refusal,
    repeated,
    wrong_length,
)
from .versions import Version

T = TypeVar("T")

# `repeated` replaces obstore's own retries, which end after some seconds.
_NO_RETRIES = {"max_retries": 0, "retry_timeout": datetime.timedelta(seconds=1)}

# Responses of fewer bytes may be parts of the HTTP client's buffers, which have up to 0.4 MB.
_BUFFERED = 1 << 19

# Encodings that leave the bytes as they are. S3's clients may store "aws-chunked" with an object.
_NOT_ENCODED = ("", "identity", "aws-chunked")
AT_ONCE = 10  # requests that obstore sends at once for a call
# A store takes 0.1 MB, and URLs with different queries, such as presigned URLs, have a store each.
_MOST_STORES = 1024
_lock = PerProcess(threading.Lock)


class ObjectClient:
    """Reads, lists and writes objects by obstore.

    The methods wait for responses, so that callers run them in the threads of `RequestThreads`.

    Args:
        options: The user's storage options; `dalijax.core.remote.locations` defines their names.
    """

    def __init__(self, options: Mapping[str, Any]):
        self._options = dict(options)
        # Stores by kind, root and account of a location. They are kept after a fork, because the
        # destructor of a store could wait for threads of obstore.
        self._stores = PerProcess[dict[tuple[str, str, str], Any]](dict, keeps=True)

    def __reduce__(self) -> Any:
        return ObjectClient, (self._options,)

    def version(self, location: Location, url: str) -> Version:
        """Returns the version of an object.

        The version is in the response to a request of a range, which also tests whether the server
        supports ranges.

        Raises:
            RemoteError: If the object can't be read, or the server does not support ranges.
        """

        def get(module: Any, store: Any) -> Version:
            self._check_redirects(location, url)
            try:
                result = module.get(store, location.key, options={"range": (0, 1)})
                _content(result)  # otherwise the connection would be closed
            except Exception as error:
                if "status code: 416" not in str(error):
                    raise
                return Version.of(module.head(store, location.key))  # an empty object
            return Version.of(result.meta)

        return self._repeated(location, url, get)

    def content(
        self, location: Location, url: str, opens: bool = False, most_bytes: int | None = None
    ) -> memoryview:
        """Returns the content of an object.

        Args:
            location: The location of the object.
            url: The URL of the object, for errors.
            opens: Whether a source is being opened. Retries then end earlier; see `patience`.
            most_bytes: The number of bytes to read of a larger object; None: all. The result has
                all bytes if the server ignores ranges.

        Raises:
            RemoteError: If the object can't be read.
        """

        def get(module: Any, store: Any) -> memoryview:
            self._check_redirects(location, url)
            if most_bytes is not None:
                options = {"range": (0, most_bytes)}
                try:
                    return _content(module.get(store, location.key, options=options))
                except Exception as error:
                    # The object is empty, or the server ignores ranges.
                    if "status code: 416" not in str(error) and "Range request" not in str(error):
                        raise
            return _content(module.get(store, location.key))

        return self._repeated(location, url, get, opens)

    def _check_redirects(self, location: Location, url: str) -> None:
        """Checks that the user's headers are not sent to another server; see `check_redirects`."""
        if location.kind == "http":
            check_redirects(url, self._options)

    def entries(self, location: Location, url: str) -> tuple[list[str], dict[str, Version]]:
        """Returns the paths of a folder's subfolders, and the versions of its objects by key.

        Raises:
            RemoteError: If the folder can't be listed.
        """

        def listed(module: Any, store: Any) -> tuple[list[str], dict[str, Version]]:
            result = module.list_with_delimiter(store, location.key)
            return list(result["common_prefixes"]), versions_of_page(result["objects"])

        return self._repeated(location, url, listed)

    def objects_below(self, location: Location, url: str) -> dict[str, Version]:
        """Returns the versions of all objects in a folder and its subfolders, by key.

        Raises:
            RemoteError: If the folder can't be listed.
        """

        versions: dict[str, Version] = {}
        for page in self._pages(location, url, location.key):
            versions |= versions_of_page(page)
        return versions

    def listed(self, location: Location, url: str, listing: Listing) -> dict[str, Version]:
        """Requests a listing, and returns the versions of the wanted objects by key.

        The result lacks objects that do not exist, and objects after the last requested page.

        Args:
            location: The location of one of the wanted objects, which are in the same bucket.
            url: The URL of this object, for errors.
            listing: The planned listing, with the keys of the wanted objects.

        Raises:
            RemoteError: If the store can't be listed.
        """

        versions: dict[str, Version] = {}
        pages = self._pages(location, url, listing.prefix, listing.offset)
        for number, page in enumerate(pages, 1):
            versions |= versions_of_page(page, listing.keys)
            is_past = listing.last is not None and page[-1]["path"] >= listing.last
            if is_past or len(versions) == len(listing.keys) or number >= listing.most_pages:
                break
        return versions

    def _pages(
        self, location: Location, url: str, prefix: str | None, after: str | None = None
    ) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yields the pages of a listing. A page has obstore's metadata of each of its objects.

        If a request fails, the listing continues after the last page; in stores that do not sort
        their listings, it begins again.

        Args:
            location: Any location in the bucket.
            url: The URL of this location, for errors.
            prefix: The folder; None: the whole bucket.
            after: Keys up to this key are not listed; None: all keys are listed.
        """
        pages: Iterator[Any] | None = None

        def next_page(module: Any, store: Any) -> Any:
            nonlocal pages
            if pages is None:
                pages = iter(module.list(store, prefix, offset=after, chunk_size=PAGE))
            try:
                return next(pages, None)
            except Exception:
                pages = None
                raise

        while page := self._repeated(location, url, next_page):
            if location.kind in SORTED:  # in other stores, a repeated listing begins at the start
                after = page[-1]["path"]
            yield page

    def write(self, location: Location, url: str, content: bytes) -> None:
        """Writes an object, and replaces an existing object.

        Raises:
            RemoteError: If the object can't be written.
        """

        def put(module: Any, store: Any) -> None:
            module.put(store, location.key, content)

        self._repeated(location, url, put)

    def _repeated(
        self, location: Location, url: str, call: Callable[[Any, Any], T], opens: bool = True
    ) -> T:
        """Calls a function until it succeeds, and returns its result; see `patiently`.

        Args:
            location: The location of an object of the store.
            url: The URL of the object, for errors.
            call: The function, which is called with obstore's module and the store.
            opens: Whether a source is being opened. Retries then end earlier; see `patience`.
        """
        return patiently(lambda: call(*self._store(location)), url, self._options, opens)

    def read(
        self,
        location: Location,
        url: str,
        starts: Sequence[int],
        ends: Sequence[int],
        version: Version,
        is_wanted: Callable[[], bool] = lambda: True,
        has_one: Callable[[], None] = lambda: None,
    ) -> list[memoryview]:
        """Reads ranges of an object, and returns the bytes of each range; repeats failed requests.

        Args:
            location: The location of the object.
            url: The URL of the object.
            starts: The first byte of each range.
            ends: The byte after the last byte of each range.
            version: The version that the object must have.
            is_wanted: Returns whether the ranges are still needed.
            has_one: Is called as soon as the remaining requests are sent one at a time.

        Raises:
            RemoteError: If a range can't be read, or the object has another version.
            Unneeded: If the ranges are no longer needed.
        """

        def read(rows: Sequence[int]) -> list[memoryview]:
            row_starts, row_ends = [starts[row] for row in rows], [ends[row] for row in rows]
            return self._read(location, url, row_starts, row_ends, version, has_one)

        def read_one(row: int) -> memoryview:
            return read([row])[0]

        def attempt(rows: list[int]) -> Sequence[memoryview | Exception]:
            """Reads the ranges with the given numbers; returns the bytes or error of each range."""
            # A retry begins with one request, because the server may be overloaded.
            first = each(read_one, rows[:1]) if has_failed else []
            has_failed.append(True)
            if any(isinstance(result, Exception) for result in first):
                return first * len(rows)
            others = rows[len(first) :]
            if not others:
                return first
            try:
                return [*first, *read(others)]
            except Exception as error:
                if len(others) == 1 or refusal(error, url) is not None:
                    return first + [error] * len(others)
            # Each range now has its own request, so that only failing ranges are repeated.
            has_one()
            return first + each(read_one, others)

        has_failed: list[bool] = []
        seconds = patience(self._options)
        return repeated(attempt, [url] * len(starts), seconds, is_wanted, self._options)

    def _read(
        self,
        location: Location,
        url: str,
        starts: Sequence[int],
        ends: Sequence[int],
        version: Version,
        has_one: Callable[[], None],
    ) -> list[memoryview]:
        """Reads ranges of an object without retries, and returns the bytes of each range.

        See `read` for the arguments. The last range is requested after the others were received,
        and its response must be of the requested version. If the server never returns an older
        version after a newer version, all ranges are then of this version, and no further request
        is needed. Object stores have this property; the edge servers of a site may not, and its
        proxies may compress some responses. So each response of an HTTP server is checked.
        """
        module, store = self._store(location)
        views: list[memoryview] = []
        num_unchecked = 0 if location.kind == "http" else len(starts) - 1
        if num_unchecked:
            contents = module.get_ranges(  # does not return the headers
                store,
                location.key,
                starts=starts[:num_unchecked],
                ends=ends[:num_unchecked],
                coalesce=0,
            )
            views += map(_own_memory, contents)
            del contents  # before waiting for the last range
        has_one()
        for start, end in zip(starts[num_unchecked:], ends[num_unchecked:], strict=True):
            options: dict[str, Any] = {"range": (start, end)}
            if version.match is not None:
                options["if_match"] = version.match
            result = module.get(store, location.key, options=options)
            if difference := version.difference(Version.of(result.meta)):
                raise changed(printable(url), difference)
            views.append(_own_memory(_content(result)))
        for view, start, end in zip(views, starts, ends, strict=True):
            if len(view) != end - start:
                raise wrong_length(start, end, len(view))
        return views

    def _store(self, location: Location) -> tuple[Any, Any]:
        """Returns obstore's module, and the store of a location, which is created if necessary."""
        module = obstore()
        stores, key = self._stores.get(), (location.kind, location.root, location.account)
        store = stores.get(key)
        if store is None:
            with _lock.get():  # each store has its own connections
                store = stores.get(key)
                if store is None:
                    while len(stores) >= _MOST_STORES:
                        stores.pop(next(iter(stores)))  # the store that was created first
                    store = stores[key] = self._new_store(module, location)
        return module, store

    def _new_store(self, module: Any, location: Location) -> Any:
        """Creates and returns obstore's store for a location.

        Raises:
            RemoteError: If a setting is invalid.
            ImportError: If the AWS profile requires boto3, which is not installed.
        """
        url = location.root if location.kind == "http" else f"{location.kind}://{location.root}"
        try:
            name, arguments = store_arguments(location, self._options, os.environ)
            if location.kind == "s3" and (provider := self._boto3(arguments["config"])):
                arguments["credential_provider"] = provider
            return getattr(module._store, name)(**arguments, retry_config=_NO_RETRIES)
        except Exception as error:
            # obstore's "builder error" may mean that no file descriptor is left, which may pass.
            passes = is_environment(error) or "builder error" in str(error)
            if passes or isinstance(error, ImportError):
                raise
            wrong = misconfigured(url, error, self._options)  # no request can be sent
        raise wrong

    def _boto3(self, config: Mapping[str, Any]) -> Any:
        """Returns boto3's provider of keys if the AWS profile requires boto3, else None.

        obstore can't read profiles that get their keys by SSO, a role or a process.

        Args:
            config: The settings of the S3 store, by obstore's names.

        Raises:
            ImportError: If boto3, which can read such a profile, is not installed.
        """
        if (
            config.get("access_key_id")
            or config.get("skip_signature")
            or ("AWS_ACCESS_KEY_ID" in os.environ and not self._options.get("profile"))
        ):
            return None
        profile = self._options.get("profile") or os.environ.get("AWS_PROFILE") or "default"
        if not needs_boto3(profile, os.environ):
            return None
        try:
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError as error:
            raise ImportError(
                f"the profile {profile!r} of ~/.aws gets its keys by SSO or a role, which requires "
                "boto3: pip install boto3"
            ) from error
        return Boto3CredentialProvider(boto3.session.Session(profile_name=profile))


def _content(result: Any) -> memoryview:
    """Returns the content of a response of obstore.

    Raises:
        WrongAnswerError: If the server, or a proxy, has encoded the bytes.
    """
    encoding = result.attributes.get("Content-Encoding", "identity")
    content = memoryview(result.bytes())
    if encoding not in _NOT_ENCODED:
        raise WrongAnswerError(f"the server sent the bytes in Content-Encoding {encoding!r:.60}")
    return content


def _own_memory(content: Any) -> memoryview:
    """Returns the content of a response in memory that contains no other bytes.

    A small response of obstore is a part of a buffer of the HTTP client, which may have a hundred
    times as many bytes, and would stay in memory. So a small response is copied.
    """
    view = memoryview(content)
    return view if len(view) >= _BUFFERED else memoryview(bytes(view))
