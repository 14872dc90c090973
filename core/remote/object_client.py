"""`ObjectClient`: reads objects of HTTP servers, S3, GCS and Azure through obstore."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..messages.printable import printable
from .locations import Place, needs_boto3, store_arguments
from .native import obstore
from .retries import FEW, Patience, WrongAnswerError, changed, exhausted, is_odd, refusal
from .versions import Version

T = TypeVar("T")

_log = logging.getLogger("dalijax")

_OPENING = 30.0  # seconds; a server that does not answer at the start is rather a wrong URL
_QUIET = 5.0  # seconds of waiting before a warning
_REPEATED = 60.0  # seconds between warnings
# `Patience` replaces obstore's own retries, which end after some seconds.
_NO_RETRIES = {"max_retries": 0, "retry_timeout": datetime.timedelta(seconds=1)}


class ObjectClient:
    """Reads objects; its coroutines run in the thread of `event_loop`.

    Args:
        options: The user's storage options; `dalijax.core.remote.locations` has their names.
    """

    def __init__(self, options: Mapping[str, Any]):
        self._options = dict(options)
        self._patience = Patience(float(options.get("retry_timeout", Patience.seconds)))
        self._stores: dict[tuple[str, str, str], Any] = {}
        self._process = 0  # the process that made the stores
        self._warned = 0.0  # when the last warning was logged

    def __reduce__(self) -> Any:
        return ObjectClient, (self._options,)

    async def version(self, place: Place, url: str) -> Version:
        """Returns the version of an object, from a request that also tests whether ranges work.

        Raises:
            OSError: If the object can't be read.
        """

        async def attempt() -> Version:
            module, store = self._store(place)
            try:
                result = await module.get_async(store, place.key, options={"range": (0, 1)})
                await result.bytes_async()  # otherwise the connection would be closed
            except Exception as error:
                if "status code: 416" not in str(error):
                    raise
                return Version.of(await module.head_async(store, place.key))  # an empty object
            return Version.of(result.meta)

        return await self._patiently(url, attempt, min(_OPENING, self._patience.seconds))

    async def read(
        self,
        place: Place,
        url: str,
        starts: Sequence[int],
        ends: Sequence[int],
        version: Version,
    ) -> list[memoryview]:
        """Reads ranges of a version of an object.

        The last range is requested after the others were received, on the condition that the
        object has the version. So all ranges are of this version, without further requests.

        Raises:
            OSError: If a range can't be read, or the object has another version.
        """

        async def attempt() -> list[memoryview]:
            return await self._read(place, url, starts, ends, version)

        try:
            return await attempt()
        except Exception as error:
            failed = error
        if len(starts) == 1:
            return await self._patiently(url, attempt, self._patience.seconds, failed)
        final = refusal(failed, url)
        if final is not None:
            raise final from None
        # Separately, so that a range that fails often does not repeat the others.
        tasks = [
            asyncio.ensure_future(self.read(place, url, [start], [end], version))
            for start, end in zip(starts, ends, strict=True)
        ]
        try:
            return [piece for pieces in await asyncio.gather(*tasks) for piece in pieces]
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self,
        place: Place,
        url: str,
        starts: Sequence[int],
        ends: Sequence[int],
        version: Version,
    ) -> list[memoryview]:
        module, store = self._store(place)
        key = place.key
        pieces: list[Any] = []
        first = len(starts) - 1 if version.is_named else len(starts)
        if first:
            pieces += await module.get_ranges_async(
                store, key, starts=starts[:first], ends=ends[:first], coalesce=0
            )
        if version.is_named:
            options: dict[str, Any] = {"range": (starts[-1], ends[-1])}
            if version.match is not None:
                options["if_match"] = version.match
            result = await module.get_async(store, key, options=options)
            if difference := version.difference(Version.of(result.meta)):
                raise changed(printable(url), difference)
            pieces.append(await result.bytes_async())
        views = [memoryview(piece) for piece in pieces]
        for view, start, end in zip(views, starts, ends, strict=True):
            if len(view) != end - start:
                raise WrongAnswerError(
                    f"requested bytes {start:,} to {end:,}, but received {len(view):,} bytes"
                )
        return views

    async def _patiently(
        self,
        url: str,
        attempt: Callable[[], Awaitable[T]],
        seconds: float,
        failed: BaseException | None = None,
    ) -> T:
        """Repeats an attempt until it succeeds, fails finally, or the time is over.

        Args:
            url: The URL, for errors.
            attempt: The attempt.
            seconds: Time after which no further attempt begins.
            failed: The error of an attempt before.
        """
        began, num_odd = time.monotonic(), 0
        delays = self._patience.delays()
        while True:
            if failed is None:
                try:
                    return await attempt()
                except Exception as error:
                    failed = error
            final = refusal(failed, url)
            if final is not None:
                raise final from None
            num_odd += is_odd(failed)
            waited = time.monotonic() - began
            delay = self._patience.jittered(next(delays), random.random())
            if waited + delay > seconds or num_odd >= FEW:
                raise exhausted(url, waited, failed) from None
            self._warn(url, waited, seconds, failed)
            await asyncio.sleep(delay)
            failed = None

    def _warn(self, url: str, waited: float, seconds: float, error: BaseException) -> None:
        now = time.monotonic()
        if waited > _QUIET and now - self._warned > _REPEATED:
            self._warned = now
            text = str(error).partition("\n")[0]
            _log.warning(
                "%s: no answer for %.0f s. It is requested again for up to %.0f s. %.300s",
                printable(url),
                waited,
                seconds,
                text,
            )

    def _store(self, place: Place) -> tuple[Any, Any]:
        """Returns obstore's module, and the store of a place, in this process."""
        module = obstore()
        if self._process != os.getpid():
            self._stores, self._process = {}, os.getpid()
        key = (place.kind, place.root, place.account)
        store = self._stores.get(key)
        if store is None:
            name, arguments = store_arguments(place, self._options, os.environ)
            if place.kind == "s3" and (provider := self._boto3(arguments["config"])):
                arguments["credential_provider"] = provider
            store = getattr(module._store, name)(**arguments, retry_config=_NO_RETRIES)
            self._stores[key] = store
        return module, store

    def _boto3(self, config: Mapping[str, Any]) -> Any:
        """Returns a provider of keys for a profile with SSO or a role; None for other profiles.

        Raises:
            ImportError: If boto3, which can read such a profile, is not installed.
        """
        if config.keys() & {"access_key_id", "skip_signature"} or (
            "AWS_ACCESS_KEY_ID" in os.environ and not self._options.get("profile")
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
