"""Translates URLs and storage options for obstore and for fsspec."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
_ODD_PART = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")  # "", "." or ".."
_BOTH = ("retry_timeout", "timeout")  # options of every store
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

# Environment variables from which obstore gets the server, or the account, of a bucket.
_SERVER_VARIABLES = {
    "http": re.compile(""),
    "s3": re.compile("AWS_ENDPOINT(_URL(_S3)?)?"),
    "gs": re.compile("GOOGLE_BASE_URL"),
    "az": re.compile("AZURE_(STORAGE_)?(ACCOUNT_NAME|ENDPOINT|USE_.*)|AZURITE_BLOB_STORAGE_URL"),
}


# Where credentials are found, apart from storage_options, by the kind of the store.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and other environment variables, ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}


# The variables from which obstore gets the URL of the server, the first that is set.
_ENDPOINTS: Mapping[str, Sequence[str]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_SERVER_URL = re.compile(
    r"https?://(?:[\w.~%!$&'()*+,;=:-]+@)?"  # user and password
    r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(\d{1,6}))?"  # host and port
    r"(?:/[^\s<>\"{}|\\^`]*)?",
    re.ASCII,
)


class Place(NamedTuple):  # created faster than a dataclass; a data set has thousands
    """The place of an object for obstore.

    Attributes:
        kind: "http", "s3", "gs" or "az".
        root: The URL of the host, or the name of the bucket or container.
        key: The path below the root.
        account: Azure's account, if the URL contains it.
    """

    kind: str
    root: str
    key: str
    account: str = ""

    def at(self, key: str) -> Place:
        """Returns the place of another key with the same root."""
        return self._replace(key=key)


def folder_place_of(url: str) -> Place | None:
    """Returns the place of a folder or a bucket (key ""); None if only fsspec can list it."""
    url = url.rstrip("/")
    place = place_of(url if url.count("/") > 2 else f"{url}/x")
    if place is None or place.kind == "http":  # HTTP has no common way to list files
        return None
    return place if url.count("/") > 2 else place.at("")


def place_of(url: str) -> Place | None:
    """Returns the place of a URL; None if only fsspec can read it.

    obstore normalizes paths. fsspec reads URLs that obstore would change, and URLs with a query.
    """
    scheme, separator, path = url.partition("://")
    kind = _KINDS.get(scheme)
    if not separator or kind is None or "::" in url:
        return None
    account = ""
    if kind == "http":
        parts = urllib.parse.urlsplit(url)
        if parts.query or parts.fragment or "@" in parts.netloc or not parts.netloc:
            return None
        root, key = f"{scheme}://{parts.netloc}/", urllib.parse.unquote(parts.path[1:])
        safe = "/~!$&'()*+,;=:@"
        if urllib.parse.quote(key, safe) != urllib.parse.quote(parts.path[1:], safe + "%"):
            return None  # e.g. an escaped slash
    else:
        root, _, key = path.partition("/")
        if "?versionId=" in key or not root:
            return None
        if kind == "az" and "@" in root:
            root, _, host = root.partition("@")
            account = host.partition(".")[0]
    if not key or _ODD_PART.search(key) or not key.isprintable():
        return None
    return Place(kind, root, key, account)


def credentials_cure(url: str) -> str:
    """Returns a remedy for errors of denied access: where the credentials of a URL are found."""
    kind = _KINDS.get(url.partition("://")[0], "") if "::" not in url else ""
    if kind == "http":
        return "Check the credentials: storage_options={'headers': {'Authorization': ...}}"
    place = _CREDENTIALS.get(kind, "environment variables")
    return (
        f"Check the credentials: {place} or storage_options=; for a public bucket, pass "
        "storage_options={'anon': True}"
    )


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Checks the names of the user's storage options for a kind of store of obstore.

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
    place: Place, options: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """Returns the name of obstore's class for a place, and the arguments of its constructor.

    Args:
        place: The place.
        options: The user's storage options.
        environment: The environment variables.

    Raises:
        ValueError: If an option is unknown, the URL of a server is invalid, or a profile does not
            exist.
    """
    check_options(place.kind, options)
    client: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": "10s",
        "pool_max_idle_per_host": "1024",
        "timeout": "1h",  # of a whole response; a stalled response ends after `read_timeout`
        "read_timeout": f"{stall_seconds(options):g}s",
    }
    arguments: dict[str, Any] = {"client_options": client}
    if place.kind == "http":
        if headers := options.get("headers"):
            client["default_headers"] = dict(headers)
        return "HTTPStore", {"url": place.root, **arguments}
    names = _NAMES[place.kind]
    config = {
        names[name]: value
        for name, value in options.items()
        if names.get(name) and value is not None
    }
    if place.kind != "s3":
        _check_server(place.kind, config, environment)
    if place.kind == "gs":
        if config.get("service_account_path") == "anon":  # as in gcsfs
            del config["service_account_path"]
            config["skip_signature"] = True
        return "GCSStore", {"bucket": place.root, "config": config, **arguments}
    if place.kind == "az":
        if place.account:
            config.setdefault("account_name", place.account)
        return "AzureStore", {"container_name": place.root, "config": config, **arguments}
    has_keys = config.get("access_key_id") or config.get("skip_signature")
    profile = options.get("profile") or environment.get("AWS_PROFILE")
    if not has_keys and (options.get("profile") or "AWS_ACCESS_KEY_ID" not in environment):
        is_required = bool(options.get("profile"))
        config = {**aws_profile(profile or "default", environment, is_required), **config}
    _check_server("s3", config, environment)
    return "S3Store", {"bucket": place.root, "config": config, **arguments}


def _check_server(kind: str, config: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Checks the URL of the server, since a request to another text ends the process.

    Raises:
        ValueError: If it is not a URL.
    """
    named = {"endpoint_url": config.get("endpoint")}
    named |= {name: environment.get(name) for name in _ENDPOINTS[kind]}
    name, url = next(((name, url) for name, url in named.items() if url), ("", ""))
    found = _SERVER_URL.fullmatch(url or "")
    if name and (found is None or int(found[1] or 0) > 65535):
        raise ValueError(f"{name} is {url!r}. Pass a URL, such as 'http://localhost:9000'")


def server_settings(
    place: Place, options: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns settings that name the server, or the account, of a place.

    They come from the environment and ``~/.aws``. URLs do not contain them, so that buckets of two
    servers may have equal URLs.
    """
    is_of_server = _SERVER_VARIABLES[place.kind].fullmatch
    settings = {name: value for name, value in environment.items() if is_of_server(name) and value}
    config = store_arguments(place, options, environment)[1].get("config", {})
    if place.kind == "s3" and config.get("endpoint"):
        settings["endpoint"] = config["endpoint"]
    return settings


def aws_profile(
    profile: str, environment: Mapping[str, str], is_required: bool = False
) -> dict[str, str]:
    """Returns keys, region and endpoint of a profile in ``~/.aws``; what is missing is omitted.

    Args:
        profile: Name of the profile.
        environment: The environment variables, which may name other files.
        is_required: Whether the profile must exist.

    Raises:
        ValueError: If a required profile does not exist.
        OSError: If a file can't be read.
    """
    home = environment.get("HOME", os.path.expanduser("~"))
    config: dict[str, str] = {}
    paths, exists = [], False
    for variable, file in (
        ("AWS_CONFIG_FILE", "config"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
    ):
        path = environment.get(variable) or os.path.join(home, ".aws", file)
        paths.append(os.path.join(home, path[2:]) if path.startswith("~/") else path)
        parser = configparser.RawConfigParser()
        with contextlib.suppress(FileNotFoundError), open(paths[-1], encoding="utf-8") as lines:
            parser.read_file(lines)
        of_config = [profile] if profile == "default" else ["profile", profile]
        for section in parser.sections():
            if _words(section) == of_config if file == "config" else section == profile:
                exists = True
                config |= dict(parser.items(section))
    if is_required and not exists:
        raise ValueError(f"the profile {profile!r} is not in {paths[0]} or {paths[1]}")
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
        "endpoint_url": "endpoint",
    }
    return {names[name]: value for name, value in config.items() if name in names and value}


def _words(section: str) -> list[str]:
    """Returns the words of a section's name, such as ``profile 'my name'``, without quotes."""
    try:
        return shlex.split(section)
    except ValueError:  # an open quote
        return [section]


def needs_boto3(profile: str, environment: Mapping[str, str]) -> bool:
    """Returns whether an AWS profile gets its keys by SSO, a role or a process, for boto3."""
    path = environment.get("AWS_CONFIG_FILE") or os.path.join(
        environment.get("HOME", os.path.expanduser("~")), ".aws", "config"
    )
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return False
    section = profile if profile == "default" else f"profile {profile}"
    body = text.partition(f"[{section}]")[2].partition("\n[")[0]
    return re.search(r"^\s*(sso_|role_arn|credential_process)", body, re.MULTILINE) is not None


def fsspec_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of fsspec's file system for a URL."""
    kind = _KINDS.get(url.partition("://")[0]) if "::" not in url else None
    arguments = {name: value for name, value in options.items() if name not in _BOTH}
    if kind == "s3" and "region" in arguments:
        arguments["client_kwargs"] = {"region_name": arguments.pop("region")}
    if kind == "s3":
        limits = {"connect_timeout": 10, "read_timeout": stall_seconds(options)}
        arguments["config_kwargs"] = {**limits, **arguments.get("config_kwargs", {})}
    if kind == "gs" and arguments.pop("anon", False):
        arguments["token"] = "anon"
    return arguments
