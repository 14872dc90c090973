"""Tars in a bucket of S3, which moto's server simulates, with credentials in several forms.

Google's XML API, which obstore uses, has the same requests, so that GCS is tested as well.
"""

import json
import os
import pathlib
import pickle
import sys

import numpy as np
import pytest

from dalijax.core.formats.byte_files import open_files
from dalijax.core.formats.paths import path_list
from dalijax.core.remote.storage import Storage
from dalijax.core.tools.index_command import write_indexes
from dalijax.sources import Files, Tar
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
    for name in ("b/1.jpg", "a/2.jpg", "a/x/3 %20.jpg", "a/note.txt", "a/.hidden.jpg"):
        (folder / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "root" / name).write_bytes(name.encode())
        client.put_object(Bucket="bucket", Key=f"root/{name}", Body=name.encode())
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


def test_a_shared_index_in_a_bucket(endpoint, tmp_path, caplog):
    url, client, folder = endpoint
    options = {**KEYS, "endpoint_url": url}
    write_indexes([f"s3://bucket/a b/{k}.tar" for k in range(2)], options)
    try:
        same(folder, options)
        assert not [record for record in caplog.records if record.name == "dalijax"]
    finally:
        client.delete_object(Bucket="bucket", Key="a b/.dalijax-tar.index")


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


def test_a_bucket_of_gcs(endpoint, tmp_path):
    url, client, folder = endpoint
    key = {"gcs_base_url": url, "disable_oauth": True}
    key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    (tmp_path / "key.json").write_text(json.dumps(key))
    options = {"storage_options": {"token": str(tmp_path / "key.json")}}
    expected = Tar([str(folder / f"{k}.tar") for k in range(2)], FIELDS)
    for pattern in ("{0..1}", "*"):
        source = Tar(f"gs://bucket/a b/{pattern}.tar", FIELDS, **options)
        assert source.identity() == expected.identity()
        values, same_values = (s.read(np.arange(40), ["data"])["data"] for s in (source, expected))
        assert [v.tobytes() for v in values] == [v.tobytes() for v in same_values]
    with pytest.raises(FileNotFoundError, match=r"gs://bucket/none\.tar does not exist"):
        Tar("gs://bucket/none.tar", FIELDS, **options)
    body = (folder / "1.tar").read_bytes()
    place = {"Bucket": "bucket", "Key": "a b/1.tar", "ACL": "public-read"}
    client.put_object(**place, Body=body + bytes(1024))
    try:
        with pytest.raises(OSError, match=r"gs://bucket/a b/1\.tar was changed.*Reopen"):
            source.read(np.array([25]), ["data"])
    finally:
        client.put_object(**place, Body=body)


def test_files_of_a_folder(endpoint, monkeypatch):
    url, _, folder = endpoint
    for name in ("s3fs", "aiobotocore"):
        monkeypatch.setitem(sys.modules, name, None)
    options = {**KEYS, "endpoint_url": url}
    local = Files(folder / "root")
    for root in ("s3://bucket/root", "s3://bucket/root/"):
        source = Files(root, storage_options=options)
        assert [source.name(i) for i in range(4)] == [
            f"s3://bucket/root/{os.path.relpath(local.name(i), folder / 'root')}" for i in range(4)
        ]
        indices = np.array([3, 0, 2, 0])
        values = pickle.loads(pickle.dumps(source)).read(indices, ["data", "label"])
        names = [os.path.relpath(local.name(i), folder / "root") for i in indices.tolist()]
        assert [v.tobytes().decode() for v in values["data"]] == names
        assert values["label"].tolist() == local.read(indices, ["label"])["label"].tolist()
        assert source.classes == local.classes == ("a", "b")
        swapped = Files(root, classes=["b", "a"], storage_options=options)
        labels = swapped.read(indices, ["label"])["label"]
        assert labels.tolist() == (1 - values["label"]).tolist()
    listed = Files(paths="s3://bucket/root/a/*.jpg", storage_options=options)
    assert [listed.name(i) for i in range(len(listed))] == ["s3://bucket/root/a/2.jpg"]
    assert listed.read(np.array([0]), ["data"])["data"][0].tobytes() == b"a/2.jpg"
    for path, error, text in (
        ("s3://bucket/none", FileNotFoundError, "none is not a directory. Check the URL"),
        ("s3://bucket/root/b/1.jpg", NotADirectoryError, "1.jpg is a file"),
        ("s3://bucket/root/b", ValueError, "s3://bucket/root/b/ has neither"),
    ):
        with pytest.raises(error, match=text):
            Files(path, storage_options=options, extensions=["png"])
    missing = Files(paths=["s3://bucket/root/none.jpg"], storage_options=options)
    with pytest.raises(FileNotFoundError, match="s3://bucket/root/none.jpg does not exist"):
        missing.read(np.array([0]), ["data"])


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("a b/*.tar", ["a b/0.tar", "a b/1.tar"]),
        ("a b/[!0].tar", ["a b/1.tar"]),
        ("*/{1,0}.tar", ["a b/1.tar", "a b/0.tar"]),
        ("root/**/*.jpg", ["root/a/2.jpg", "root/a/x/3 %20.jpg", "root/b/1.jpg"]),
        ("root/*/.*.jpg", ["root/a/.hidden.jpg"]),
    ],
)
def test_patterns(pattern, keys, endpoint):
    url, _, _ = endpoint
    storage = Storage({**KEYS, "endpoint_url": url})
    assert path_list(f"s3://bucket/{pattern}", storage) == [f"s3://bucket/{key}" for key in keys]
    with pytest.raises(FileNotFoundError, match="matches no file"):
        path_list("s3://bucket/*.none", storage)


def test_keys_with_empty_parts(endpoint):
    url, client, _ = endpoint
    for key in ("odd/a//1.bin", "odd/2.bin", "odd/3.bin"):
        client.put_object(Bucket="bucket", Key=key, Body=key.encode())
    storage = Storage({**KEYS, "endpoint_url": url})
    with pytest.raises(OSError, match=r"bucket/odd can't be listed: .*odd/a//1.bin.*Rename"):
        path_list("s3://bucket/odd/**.bin", storage)
    # The listing fails, so that each object is requested.
    paths = [f"s3://bucket/odd/{k}.bin" for k in (2, 3)]
    assert [file.size for file in open_files(paths, storage)] == [9, 9]
    with pytest.raises(ValueError, match=r"odd/a//1\.bin: obstore reads neither.*presigned https"):
        Files(paths=["s3://bucket/odd/a//1.bin"]).read(np.array([0]), ["data"])
    signed = client.generate_presigned_url(
        "get_object", Params={"Bucket": "bucket", "Key": "odd/a//1.bin"}
    )
    read = Files(paths=[signed]).read(np.array([0]), ["data"])["data"]
    assert read[0].tobytes() == b"odd/a//1.bin"


def test_presigned_urls(endpoint):
    _, client, folder = endpoint
    signed = [
        client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": key})
        for key in ("a b/0.tar", "a b/1.tar")
    ]
    source, local = Tar(signed, FIELDS), Tar([str(folder / f"{k}.tar") for k in range(2)], FIELDS)
    first, second = (s.read(np.array([39, 0, 25]), ["data"])["data"] for s in (source, local))
    assert [v.tobytes() for v in first] == [v.tobytes() for v in second]
