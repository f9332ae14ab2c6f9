"""What a registry may ask for before it answers: tokens, other places; and where credentials do not go."""

import base64
import contextlib
import json
import socket
import threading
import urllib.parse
from collections.abc import Iterator

import pytest
from helpers.registry_servers import Reply, Server, answering
from helpers.stores import write_docker_config

from envbuild.core.errors import NetworkError
from envbuild.store import registry, transfer
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry
from envbuild.store.upload import mount_blob, upload_blob


@pytest.fixture
def server() -> Iterator[Server]:
    with answering() as running:
        yield running


@pytest.fixture
def other() -> Iterator[Server]:
    with answering() as running:
        yield running


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(registry, "BACKOFF_SECONDS", 0.0)


def login(tmp_path, server: Server, entry: dict[str, str]) -> dict[str, str]:
    return {"HOME": str(tmp_path), **write_docker_config(tmp_path / "docker", {"auths": {server.host: entry}})}


def opened(server: Server, environ: dict[str, str]) -> Registry:
    return Registry(parse_address(f"oci://{server.host}/team/store"), None, environ)


BASIC = base64.b64encode(b"ali:sesame").decode()


def with_tokens(server: Server, tokens: Server) -> None:
    """The registry wants a token for each scope, and names the place of tokens."""

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        scope = "repository:team/store:" + ("pull" if method == "GET" else "pull,push")
        if headers.get("Authorization") != f"Bearer token-for-{scope}":
            challenge = f'Bearer realm="http://{tokens.host}/token",service="tests",scope="{scope}"'
            return 401, {"WWW-Authenticate": challenge}, b"{}"
        return 200, {}, b"content"

    def token(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query or body.decode())
        if headers.get("Authorization") == f"Basic {BASIC}" or query.get("refresh_token") == ["identity"]:
            return 200, {}, json.dumps({"token": f"token-for-{query['scope'][0]}"}).encode()
        return 401, {}, b""

    server.answer, tokens.answer = answer, token


@pytest.mark.parametrize("entry", [{"auth": BASIC}, {"identitytoken": "identity"}], ids=["password", "identity token"])
def test_a_token_is_got_for_each_scope(server, other, tmp_path, entry):
    with_tokens(server, other)
    asking = opened(server, login(tmp_path, server, entry))
    assert asking.ask("GET", "manifests/a", accept=(200,)).body == b"content"
    asking.ask("GET", "manifests/b", accept=(200,))
    assert len(other.requests) == 1, "the token is kept"
    asking.ask("PUT", "manifests/a", accept=(200,), body=b"x")
    scopes = [
        urllib.parse.parse_qs(urllib.parse.urlsplit(path).query or body.decode())["scope"][0]
        for _, path, _, body in other.requests
    ]
    assert scopes == ["repository:team/store:pull", "repository:team/store:pull,push"]
    assert not [headers for _, _, headers, _ in server.requests if BASIC in str(headers)], (
        "passwords go to the token's place"
    )


def test_a_token_that_is_refused_is_a_network_error(server, other, tmp_path):
    with_tokens(server, other)
    asking = opened(server, login(tmp_path, server, {"auth": base64.b64encode(b"ali:wrong").decode()}))
    with pytest.raises(NetworkError, match="status 401") as refused:
        asking.ask("GET", "manifests/a", accept=(200,))
    assert "as ali" in refused.value.why
    assert "wrong" not in str(refused.value.as_json())


def test_credentials_do_not_go_to_a_place_without_tls(server, tmp_path):
    challenge = 'Bearer realm="http://tokens.example.org/token",service="tests"'
    server.answer = lambda *_: (401, {"WWW-Authenticate": challenge}, b"")
    with pytest.raises(NetworkError, match="without TLS"):
        opened(server, login(tmp_path, server, {"auth": BASIC})).ask("GET", "manifests/a", accept=(200,))


def test_password_is_sent_once_after_a_challenge(server, tmp_path):
    server.answer = lambda *_: (401, {"WWW-Authenticate": 'Basic realm="tests"'}, b"")
    with pytest.raises(NetworkError, match="status 401"):
        opened(server, login(tmp_path, server, {"auth": BASIC})).ask("GET", "manifests/a", accept=(200,))
    assert [headers.get("Authorization") for _, _, headers, _ in server.requests] == [None, f"Basic {BASIC}"]


def test_credentials_of_the_repository_come_before_those_of_the_registry(server, tmp_path):
    server.answer = lambda *_: (401, {"WWW-Authenticate": 'Basic realm="tests"'}, b"")
    own, others = {"auth": BASIC}, {"auth": base64.b64encode(b"others:x").decode()}
    auths = {server.host: others, f"{server.host}/team": own, f"{server.host}/other": others}
    environ = {"HOME": str(tmp_path), **write_docker_config(tmp_path / "docker", {"auths": auths})}
    with pytest.raises(NetworkError, match="status 401"):
        opened(server, environ).ask("GET", "manifests/a", accept=(200,))
    assert server.requests[-1][2]["Authorization"] == f"Basic {BASIC}"


def test_a_redirect_to_another_place_takes_no_credentials_along(server, other, tmp_path):
    """As registries send to object stores."""

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if "Authorization" not in headers:
            return 401, {"WWW-Authenticate": 'Basic realm="tests"'}, b""
        return 307, {"Location": f"http://{other.host}/elsewhere"}, b""

    server.answer = answer
    other.answer = lambda *_: (200, {}, b"content")
    to = tmp_path / "file"
    assert opened(server, login(tmp_path, server, {"auth": BASIC})).download("blobs/x", 7, to)
    assert to.read_bytes() == b"content"
    ((_, path, headers, _),) = other.requests
    assert path == "/elsewhere"
    assert "Authorization" not in headers


def test_upload_to_another_place_takes_no_credentials_along(server, other, tmp_path):
    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if "Authorization" not in headers:
            return 401, {"WWW-Authenticate": 'Basic realm="tests"'}, b""
        return 202, {"Location": f"http://{other.host}/elsewhere"}, b""

    server.answer = answer
    other.answer = lambda *_: (201, {}, b"")
    (tmp_path / "file").write_bytes(b"content")
    uploading = opened(server, login(tmp_path, server, {"auth": BASIC}))
    assert upload_blob(uploading, tmp_path / "file", "x", 7) == 7
    ((_, _, headers, body),) = other.requests
    assert (body, "Authorization" in headers) == (b"content", False)


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
    """What was cut is asked for from where it was cut; where all comes again, it is not added."""
    server.cut_once = 4
    server.answer = lambda *_: (200, {}, b"content")
    to = tmp_path / "file"
    assert opened(server, {"HOME": str(tmp_path)}).download("blobs/x", 7, to)
    assert to.read_bytes() == b"content"
    assert [headers.get("Range") for _, _, headers, _ in server.requests] == [None, "bytes=4-"]


def test_a_message_of_a_registry_is_one_line_of_text(server, tmp_path):
    body = json.dumps({"errors": [{"code": "DENIED", "message": "no\x1b[31m\nway " + "x" * 1000}]}).encode()
    server.answer = lambda *_: (403, {}, body)
    with pytest.raises(NetworkError) as refused:
        opened(server, {"HOME": str(tmp_path)}).ask("GET", "manifests/a", accept=(200,))
    assert "Its message: no [31m way x" in refused.value.why
    assert len(refused.value.why) < 500


def trickling(server, monkeypatch, seconds=0.2):
    """Its bodies come byte by byte; what is a minute otherwise is an instant."""
    monkeypatch.setattr(transfer, "SLOW_SECONDS", seconds)
    server.pause = 0.02


def ask(registry, tmp_path):
    registry.ask("GET", "blobs/x", accept=(200,))


def download(registry, tmp_path):
    registry.download("blobs/x", 5000, tmp_path / "file")


@pytest.mark.parametrize("asking", [ask, download])
def test_registry_that_trickles_is_given_up(server, tmp_path, monkeypatch, asking):
    trickling(server, monkeypatch)
    monkeypatch.setattr(registry, "RETRIES", 1)
    server.answer = lambda *_: (200, {}, b"x" * 5000)
    with pytest.raises(NetworkError, match="cannot be reached") as slow:
        asking(opened(server, {"HOME": str(tmp_path)}), tmp_path)
    assert "bytes a second for" in slow.value.why
    assert len(server.requests) == registry.RETRIES + 1


def test_a_slow_registry_is_waited_for(server, tmp_path, monkeypatch):
    trickling(server, monkeypatch)
    monkeypatch.setattr(transfer, "LEAST_BYTES_A_SECOND", 5)
    server.answer = lambda *_: (200, {}, b"x" * 30)
    assert opened(server, {"HOME": str(tmp_path)}).ask("GET", "manifests/a", accept=(200,)).body == b"x" * 30


@pytest.mark.parametrize("asking", [ask, download])
@pytest.mark.parametrize("status", [401, 403])
def test_a_place_that_was_redirected_to_is_named_where_it_refuses(server, other, tmp_path, asking, status):
    server.answer = lambda *_: (307, {"Location": f"http://{other.host}/signed"}, b"")
    challenge = {"WWW-Authenticate": f'Bearer realm="http://{other.host}/token"'}
    other.answer = lambda *_: (status, challenge, b"")
    with pytest.raises(NetworkError) as refused:
        asking(opened(server, login(tmp_path, server, {"auth": BASIC})), tmp_path)
    assert refused.value.what.startswith(f"{other.host}, to which the store oci://{server.host}/team/store redirects")
    assert "clock" in refused.value.fix
    # Whatever it asks for: credentials are the registry's.
    assert not [headers for _, _, headers, _ in other.requests if "Authorization" in headers]


def test_answer_that_is_nested_too_deeply_is_refused(server, other, tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    server.answer = lambda *_: (403, {}, deep)
    with pytest.raises(NetworkError, match="status 403"):
        opened(server, {"HOME": str(tmp_path)}).ask("GET", "manifests/a", accept=(200,))
    with_tokens(server, other)
    other.answer = lambda *_: (200, {}, deep)
    with pytest.raises(NetworkError, match="gives no token"):
        opened(server, login(tmp_path, server, {"auth": BASIC})).ask("GET", "manifests/a", accept=(200,))


def raw_server(answer):
    """A server that writes what it likes to whoever asks."""

    @contextlib.contextmanager
    def running():
        def serve(connection):
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                answer(connection)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=accept, daemon=True).start()
            try:
                yield Server(port=listener.getsockname()[1])
            finally:
                listener.shutdown(socket.SHUT_RDWR)

    return running()


def test_a_file_that_is_whole_is_not_asked_for_again(tmp_path):
    """Cut after its last byte, before the end is said: a range from there on would be refused."""
    answers = iter([b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\ncontent\r\n"])
    refusal = b"416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n"
    to = tmp_path / "file"
    with raw_server(lambda connection: connection.sendall(b"HTTP/1.1 " + next(answers, refusal))) as server:
        assert opened(server, {"HOME": str(tmp_path)}).download("blobs/x", 7, to)
    assert to.read_bytes() == b"content"


def test_a_token_to_mount_with_may_read_the_other_repository(server, other, tmp_path):
    """Also where the registry does not ask for that by itself."""
    with_tokens(server, other)
    wanted = "repository:team/store:pull,push repository:team/other:pull"

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if headers.get("Authorization") != f"Bearer token-for-{wanted}":
            challenge = f'Bearer realm="http://{other.host}/token",scope="repository:team/store:pull,push"'
            return 401, {"WWW-Authenticate": challenge}, b"{}"
        return 201, {}, b""

    server.answer = answer
    environ = login(tmp_path, server, {"auth": BASIC})
    mounting = Registry(parse_address(f"oci://{server.host}/team/store"), None, environ, also_read=["team/other"])
    assert mount_blob(mounting, "sha256:1", "team/other")
    (path,) = [path for method, path, _, _ in server.requests if method == "POST" and "mount" in path][-1:]
    assert urllib.parse.parse_qs(urllib.parse.urlsplit(path).query) == {"mount": ["sha256:1"], "from": ["team/other"]}


@pytest.mark.parametrize("status", [202, 401, 403, 404])
def test_a_blob_that_cannot_be_mounted_is_no_error(server, tmp_path, status):
    server.answer = lambda *_: (status, {}, b"")
    assert not mount_blob(opened(server, {"HOME": str(tmp_path)}), "sha256:1", "team/other")
