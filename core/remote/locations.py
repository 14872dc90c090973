"""Selects the client of each URL, and translates URLs and storage options for it."""

from __future__ import annotations

import base64
import collections
import configparser
import contextlib
import os
import re
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..messages.printable import printable

# Prefixes of URLs that obstore reads, by the kind of the store.
_KINDS = {
    "http": "http",
    "https": "http",
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
}
# A part "", "." or "..", or a control character: obstore rejects such a key, or changes it.
_ODD_KEY = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|[\x00-\x1f\x7f]")
_BOTH = ("retry_timeout", "timeout")  # options of every store
_IDENTITY = {"Accept-Encoding": "identity"}  # a compressed response has other bytes than the range
# obstore's name of each option. `anon` and `profile` are translated separately.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "http": {"headers": ""},
    "s3": {
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "key": "access_key_id",
        "profile": "",
        "region": "region",
        "requester_pays": "request_payer",
        "secret": "secret_access_key",
        "token": "session_token",
    },
    "gs": {"anon": "skip_signature", "token": "service_account_path"},
    "az": {
        "account_key": "account_key",
        "account_name": "account_name",
        "anon": "skip_signature",
        "client_id": "client_id",
        "client_secret": "client_secret",
        "endpoint_url": "endpoint",
        "sas_token": "sas_key",
        "tenant_id": "tenant_id",
    },
}

# obstore's class of each kind of store, and the argument of the class for the root of a location.
_STORES = {
    "s3": ("S3Store", "bucket"),
    "gs": ("GCSStore", "bucket"),
    "az": ("AzureStore", "container_name"),
}

# Where credentials are found, apart from storage_options, by the kind of the store.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and other environment variables, ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}

# Environment variables from which obstore gets the URL of the server, in order of precedence.
_ENDPOINTS: Mapping[str, Sequence[str]] = {
    "http": (),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
# Further variables that choose the server or the account of an Azure container.
_AZURE = re.compile("AZURE_(STORAGE_)?(ACCOUNT_NAME|USE_.*)|AZURITE_BLOB_STORAGE_URL")
_AWS_FILES = {"config": "AWS_CONFIG_FILE", "credentials": "AWS_SHARED_CREDENTIALS_FILE"}
_SERVER_URL = re.compile(
    r"https?://(?:[\w.~%!$&'()*+,;=:-]+@)?"  # user and password
    r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(\d{1,6}))?"  # host and port
    r"(?:/[^\s<>\"{}|\\^`]*)?",
    re.ASCII,
)


class Location(NamedTuple):  # created faster than a dataclass; a data set has thousands
    """The location of an object, with the parts that obstore needs.

    Attributes:
        kind: The kind of the store: "http", "s3", "gs" or "az".
        root: The URL of the host, with the query; or the name of the bucket or container.
        key: The path below the root; "" if the root is the whole URL of a file.
        account: Azure's account, if the URL contains it.
    """

    kind: str
    root: str
    key: str
    account: str = ""

    def at(self, key: str) -> Location:
        """Returns the location of another key in the same store and root."""
        return self._replace(key=key)


def folder_location_of(url: str) -> Location | None:
    """Returns the location of the folder or bucket of a URL; None if fsspec lists the URL.

    The key of a bucket is "".

    Raises:
        ValueError: If obstore can't list the folder.
    """
    url = url.rstrip("/")
    location = location_of(url if url.count("/") > 2 else f"{url}/x")
    if location is None or location.kind == "http":  # HTTP has no common way to list files
        return None
    return location if url.count("/") > 2 else location.at("")


def location_of(url: str) -> Location | None:
    """Returns the location of a URL that obstore reads; None if fsspec reads the URL.

    fsspec reads chained URLs, and schemes that obstore lacks.

    Raises:
        ValueError: If obstore can't read the URL.
    """
    kind, (_, separator, path) = kind_of(url), url.partition("://")
    if not separator or kind is None:
        return None
    if kind == "http":
        return _http_location(url)
    root, _, key = path.partition("/")
    if not root or not key:
        raise ValueError(f"{printable(url)} names no object. Pass a URL such as s3://bucket/key")
    if _ODD_KEY.search(key) or "?versionId=" in key:
        raise ValueError(
            f"{printable(url)}: obstore reads neither keys with empty parts, parts '.' or '..' or "
            "control characters, nor versions of objects. Rename the object, or pass a presigned "
            "https:// URL"
        )
    account = ""
    if kind == "az" and "@" in root:
        root, _, host = root.partition("@")
        account = host.partition(".")[0]
    return Location(kind, root, key, account)


def _http_location(url: str) -> Location:
    """Returns the location of a file on an HTTP server.

    A path that obstore would change belongs to the root, which then has no other files.

    Raises:
        ValueError: If the URL has no valid host and port.
    """
    parts = None
    with contextlib.suppress(ValueError):  # whose text may contain a part of a password
        split = urllib.parse.urlsplit(url)
        parts = split if split.port != 0 else None
    if parts is None:
        raise ValueError(
            f"{printable(url)}: the host or the port is not valid. In passwords, replace special "
            "characters by urllib.parse.quote(password, safe='')"
        )
    if not parts.hostname:
        raise ValueError(f"{printable(url)} has no host")
    root, key = f"{parts.scheme}://{parts.netloc}/", urllib.parse.unquote(parts.path[1:])
    safe = "/~!$&'()*+,;=:@"
    sent = urllib.parse.quote(key, safe), urllib.parse.quote(parts.path[1:], safe + "%")
    if sent[0].lower() != sent[1].lower() or _ODD_KEY.search(key):  # e.g. an escaped slash
        root, key = root + parts.path[1:], ""
    return Location("http", f"{root}?{parts.query}" if parts.query else root, key)


def kind_of(url: str) -> str | None:
    """Returns the kind of the store of a URL; None if obstore does not support the URL's scheme.

    Returns None also for chained URLs.
    """
    return _KINDS.get(url.partition("://")[0].lower()) if "::" not in url else None


def credentials_cure(url: str) -> str:
    """Returns a sentence for errors of denied access: how to set the credentials of a URL."""
    kind = kind_of(url) or ""
    if kind == "http":
        return "Check the credentials: storage_options={'headers': {'Authorization': ...}}"
    sources = _CREDENTIALS.get(kind, "environment variables")
    return (
        f"Check the credentials: {sources} or storage_options=; for a public bucket, pass "
        "storage_options={'anon': True}"
    )


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Checks that stores of a kind accept the names of the user's storage options.

    Raises:
        ValueError: If stores of this kind do not accept an option.
    """
    names = sorted({*_NAMES[kind], *_BOTH})
    for name in options:
        if name not in names:
            raise ValueError(
                f"storage_options has {name!r}, which {kind}:// does not take. It takes "
                f"{', '.join(names)}"
            )


def stall_seconds(options: Mapping[str, Any]) -> float:
    """Returns the number of seconds without a byte after which a request fails."""
    return float(options.get("timeout", 20))


def store_arguments(
    location: Location, options: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """Returns the name of obstore's class for a location, and the arguments of its constructor.

    Args:
        location: The location.
        options: The user's storage options.
        environment: The environment variables.

    Raises:
        ValueError: If an option is unknown, the URL of a server is invalid, or a profile does not
            exist.
    """
    check_options(location.kind, options)
    client: dict[str, Any] = {
        # An https URL is not read over http after a redirect.
        "allow_http": not location.root.startswith("https://"),
        "connect_timeout": "10s",
        "default_headers": _IDENTITY,
        "pool_max_idle_per_host": "1024",
        "timeout": "1h",  # of a whole response; a stalled response ends after `read_timeout`
        "read_timeout": f"{stall_seconds(options):g}s",
    }
    arguments: dict[str, Any] = {"client_options": client}
    if location.kind == "http":
        if not location.key or "?" in location.root:  # there may be such a store for each file
            client |= {"pool_max_idle_per_host": "4", "pool_idle_timeout": "10s"}
        arguments["url"], client["default_headers"] = http_request(location.root, options)
        return "HTTPStore", arguments
    names = _NAMES[location.kind]
    config = {
        names[name]: value
        for name, value in options.items()
        if names.get(name) and value is not None
    }
    if location.kind == "gs" and config.get("service_account_path") == "anon":  # as in gcsfs
        del config["service_account_path"]
        config["skip_signature"] = True
    elif location.kind == "az" and location.account:
        config.setdefault("account_name", location.account)
    elif location.kind == "s3":
        has_keys = config.get("access_key_id") or config.get("skip_signature")
        required = options.get("profile")
        if not has_keys and (required or "AWS_ACCESS_KEY_ID" not in environment):
            profile = required or environment.get("AWS_PROFILE") or "default"
            config = {**aws_profile(profile, environment, bool(required)), **config}
    _check_server(location.kind, config, environment)
    store, root = _STORES[location.kind]
    return store, {root: location.root, "config": config, **arguments}


def http_request(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the URL without user and password, and the headers of requests.

    Args:
        url: The URL, or its root.
        options: The user's storage options.
    """
    given = options.get("headers") or {}
    headers = {name: given[name] for name in given if name.lower() != "accept-encoding"} | _IDENTITY
    parts = urllib.parse.urlsplit(url)
    user, is_given, host = parts.netloc.rpartition("@")
    if is_given:
        token = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
        headers = {"Authorization": f"Basic {token}", **headers}
    return parts._replace(netloc=host).geturl(), headers


def _check_server(kind: str, config: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Checks that the setting of the server is a URL; else a request would end the process.

    Raises:
        ValueError: If the setting is not a URL.
    """
    named = {"endpoint_url": config.get("endpoint")}
    named |= {name: environment.get(name) for name in _ENDPOINTS[kind]}
    name, url = next(((name, url) for name, url in named.items() if url), ("", ""))
    found = _SERVER_URL.fullmatch(url or "")
    if name and (found is None or int(found[1] or 0) > 65535):
        raise ValueError(f"{name} is not valid. Pass a URL, such as 'http://localhost:9000'")


def server_settings(
    location: Location, options: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the settings that determine the server or the account of a location, by name.

    The settings come from the options, the environment and ``~/.aws``. URLs do not contain these
    settings, so that buckets of two servers may have equal URLs.
    """
    settings = {
        name: value
        for name, value in environment.items()
        if value
        and (
            name in _ENDPOINTS[location.kind] or (location.kind == "az" and _AZURE.fullmatch(name))
        )
    }
    config = store_arguments(location, options, environment)[1].get("config", {})
    if location.kind == "s3" and config.get("endpoint"):
        settings["endpoint"] = config["endpoint"]
    return settings


def aws_profile(
    profile: str, environment: Mapping[str, str], is_required: bool = False
) -> dict[str, str]:
    """Returns keys, region and endpoint of a profile in ``~/.aws``, by obstore's names.

    Values that the profile lacks are omitted.

    Args:
        profile: Name of the profile.
        environment: The environment variables, which may name other files than ``~/.aws``.
        is_required: Whether the profile must exist.

    Raises:
        ValueError: If a required profile does not exist.
        OSError: If a file can't be read.
    """
    of_config = _profile_values(profile, environment, "config")
    of_credentials = _profile_values(profile, environment, "credentials")
    if is_required and of_config is None and of_credentials is None:
        paths = " or ".join(_aws_path(environment, file) for file in _AWS_FILES)
        raise ValueError(f"the profile {profile!r} is not in {paths}")
    config = (of_config or {}) | (of_credentials or {})
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
        "endpoint_url": "endpoint",
    }
    return {names[name]: value for name, value in config.items() if name in names and value}


def _aws_path(environment: Mapping[str, str], file: str) -> str:
    """Returns the path of AWS's "config" or "credentials" file."""
    home = environment.get("HOME", os.path.expanduser("~"))
    path = environment.get(_AWS_FILES[file]) or os.path.join(home, ".aws", file)
    return os.path.join(home, path[2:]) if path.startswith("~/") else path


def _profile_values(
    profile: str, environment: Mapping[str, str], file: str
) -> dict[str, str] | None:
    """Returns the values of a profile in AWS's "config" or "credentials" file.

    Returns None if the file or the profile does not exist.

    Raises:
        OSError: If the file can't be read.
    """
    parser = configparser.RawConfigParser()
    with (
        contextlib.suppress(FileNotFoundError),
        open(_aws_path(environment, file), encoding="utf-8") as lines,
    ):
        parser.read_file(lines)

    def is_of_profile(section: str) -> bool:
        if file == "credentials" or profile == "default":
            return section == profile
        try:
            return shlex.split(section) == ["profile", profile]  # such as profile 'my name'
        except ValueError:  # an open quote
            return False

    sections = [dict(parser.items(name)) for name in filter(is_of_profile, parser.sections())]
    return dict(collections.ChainMap(*reversed(sections))) if sections else None


def needs_boto3(profile: str, environment: Mapping[str, str]) -> bool:
    """Returns whether an AWS profile needs boto3 to get its keys by SSO, a role or a process."""
    values = _profile_values(profile, environment, "config") or {}
    return any(name.startswith(("sso_", "role_arn", "credential_process")) for name in values)


def fsspec_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of one of fsspec's file systems."""
    return {name: value for name, value in options.items() if name not in _BOTH}
