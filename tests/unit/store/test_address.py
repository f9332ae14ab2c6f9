"""Addresses of remote stores: what is one, what is none, and that no password is said."""

import pytest

from envbuild.core.errors import ConfigurationError
from envbuild.store.address import parse_address


@pytest.mark.parametrize(
    ("text", "scheme", "host", "path"),
    [
        ("oci://127.0.0.1:5000/team/wheels", "oci", "127.0.0.1:5000", "team/wheels"),
        ("oci://registry.example.org/a_b/c-d.e", "oci", "registry.example.org", "a_b/c-d.e"),
        ("oci://[::1]:5000/a", "oci", "[::1]:5000", "a"),
        ("oci://[::1]/a", "oci", "[::1]", "a"),
        ("oci://host:65535/a", "oci", "host:65535", "a"),
        ("s3://bucket", "s3", "bucket", ""),
        ("s3://my.bucket/deep/prefix/", "s3", "my.bucket", "deep/prefix"),
        ("gs://bucket/p", "gs", "bucket", "p"),
        ("file:///shared/wheels", "file", "", "/shared/wheels"),
        ("file:///shared/my%20wheels", "file", "", "/shared/my wheels"),
    ],
)
def test_address(text, scheme, host, path):
    found = parse_address(text)
    assert (found.scheme, found.host, found.path) == (scheme, host, path)
    assert parse_address(str(found).replace(" ", "%20")) == found


@pytest.mark.parametrize(
    "text",
    [
        "", "bucket", "/shared", "http://host/a", "S3://bucket", "s3:/bucket", "s3://", "s3:///prefix", "s3://b/../x",
        "s3://b//x", "s3://bucket/a b", "s3://bucket?x=1", "s3://bucket#x", "s3://bucket/\n", "gs://b", "oci://host",
        "oci://host/Team", "oci://host:port/a", "oci:///a", "oci://-host/a", "oci://host/a:tag",
        "oci://host/a@sha256:00", "file://shared/wheels", "file://", "file:///",
        "oci://host:99999/a", "oci://host:0/a", "oci://[::1]:65536/a",
    ],
)  # fmt: skip
def test_wrong_address_is_refused(text):
    with pytest.raises(ConfigurationError) as refused:
        parse_address(text)
    assert "oci://HOST" in refused.value.why or "holds a user name" in refused.value.what
    assert refused.value.fix


@pytest.mark.parametrize("text", ["oci://me:secret@host/a", "s3://AKID:secret@bucket/x", "gs://secret@bucket"])
def test_password_in_an_address_is_refused_and_not_shown(text):
    with pytest.raises(ConfigurationError, match="holds a user name or password") as refused:
        parse_address(text)
    assert "secret" not in str(refused.value.as_json())


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1:5000", True), ("localhost", True), ("localhost:1", True), ("[::1]:5000", True), ("127.9.9.9", True),
        ("registry.example.org", False), ("10.0.0.1:5000", False), ("localhost.example.org", False),
        ("127.0.0.1.x.org", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_loopback(host, loopback):
    assert parse_address(f"oci://{host}/a").is_loopback is loopback
