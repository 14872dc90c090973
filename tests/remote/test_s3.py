"""Tars in a bucket of S3, which moto's server simulates, with credentials in several forms."""

import pathlib

import numpy as np
import pytest

from dalijax.sources import Tar
from tars import FIELDS, samples, write_tar

pytest.importorskip("obstore")
moto_server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")
pytest.importorskip("flask")

KEYS = {"key": "testing", "secret": "testing", "region": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    server = moto_server.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}".replace("0.0.0.0", "127.0.0.1")
    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="bucket")
    folder = tmp_path_factory.mktemp("tars")
    for k in range(2):
        path = write_tar(folder / f"{k}.tar", samples(k * 20, k * 20 + 20))
        body = pathlib.Path(path).read_bytes()
        client.put_object(Bucket="bucket", Key=f"a b/{k}.tar", Body=body, ACL="public-read")
    yield url, client, folder
    server.stop()


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def same(folder, options=None):
    source = Tar([f"s3://bucket/a b/{k}.tar" for k in range(2)], FIELDS, storage_options=options)
    local = Tar([str(folder / f"{k}.tar") for k in range(2)], FIELDS)
    indices = np.array([39, 0, 3, 0, 25])
    first, second = (s.read(indices, ["data", "label"]) for s in (source, local))
    assert [v.tobytes() for v in first["data"]] == [v.tobytes() for v in second["data"]]
    assert first["label"].tolist() == second["label"].tolist()
    assert source.identity() == local.identity()
    return source


def test_keys_in_options(endpoint):
    url, _, folder = endpoint
    same(folder, {**KEYS, "endpoint_url": url})


def test_keys_in_the_environment(endpoint, monkeypatch):
    url, _, folder = endpoint
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    same(folder)


@pytest.mark.parametrize("profile", ("default", "other"))
def test_keys_in_profiles(profile, endpoint, tmp_path, monkeypatch):
    url, _, folder = endpoint
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[{profile}]\naws_access_key_id=testing\naws_secret_access_key=testing\n"
    )
    section = profile if profile == "default" else f"profile {profile}"
    (tmp_path / ".aws/config").write_text(f"[{section}]\nendpoint_url={url}\nregion=us-east-1\n")
    same(folder, {} if profile == "default" else {"profile": profile})
    monkeypatch.setenv("AWS_PROFILE", profile)
    same(folder)


def test_anonymous_reads_of_a_public_bucket(endpoint):
    url, _, folder = endpoint
    same(folder, {"anon": True, "endpoint_url": url})


def test_errors_and_changes(endpoint):
    url, client, folder = endpoint
    options = {**KEYS, "endpoint_url": url}
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/none\.tar does not exist"):
        Tar("s3://bucket/none.tar", FIELDS, storage_options=options)
    source = same(folder, options)
    path = pathlib.Path(write_tar(folder / "2.tar", samples(40, 60)))
    client.put_object(Bucket="bucket", Key="a b/1.tar", Body=path.read_bytes())
    try:
        with pytest.raises(OSError, match=r"s3://bucket/a b/1\.tar was changed.*Reopen"):
            source.read(np.array([25]), ["data"])
    finally:
        body = (folder / "1.tar").read_bytes()
        client.put_object(Bucket="bucket", Key="a b/1.tar", Body=body, ACL="public-read")
