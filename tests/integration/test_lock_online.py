"""`envbuild lock --check --online`: every file that a lock names, compared with what real pages list."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import ANY, OLD, error
from helpers.simple_index import SimpleIndex, make_sdist, simple_index
from helpers.stack_files import write_stack
from helpers.wheels import make_wheel

WHEEL, SDIST = f"lib-1.0-{ANY}.whl", "lib-1.0.tar.gz"
PAGE = "/simple/lib/"


@pytest.fixture
def locked(own: Any, index: SimpleIndex, wheel: Callable[..., Path], tmp_path: Path) -> Any:
    """The tool with a lock of `lib`, of which the index has a wheel and an sdist."""
    wheel("lib", "1.0")
    index.add(make_sdist(tmp_path, "lib", "1.0"), OLD)
    write_stack(own.project, "s", {"lib": {}}, as_of="2025-02-01")
    own.run("lock", "--stack", "s")
    return own


def online(tool: Any, status: int = 0) -> Any:
    done = tool.run("lock", "--check", "--online", "--json", status=status)
    return error(done) if status else done


def send(handler: BaseHTTPRequestHandler, status: int, **headers: str) -> bool:
    handler.send_response(status)
    for name, value in {"Content_Length": "0", **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    return True


def as_html(index: SimpleIndex, folder: str) -> None:
    """The page of `lib` as PEP 503 has it; addresses are relative to ``folder``."""
    page = index.page("lib")
    assert page is not None
    links = []
    for file in page["files"]:
        yanked = ' data-yanked="broken &amp; gone"' if file["yanked"] else ""
        href = f"{folder}{html.escape(file['filename'])}#sha256={file['hashes']['sha256']}"
        links.append(f'<a href="{href}"{yanked}>{file["filename"]}</a><br>')
    index.bodies["/simple/lib/"] = (
        200,
        "text/html",
        f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode(),
    )


def test_a_file_that_was_dropped_beside_another(locked: Any, index: SimpleIndex) -> None:
    online(locked)
    index.remove(WHEEL)
    refused = online(locked, 5)
    assert f"lib 1.0: {WHEEL} is gone: sha256:" in refused["why"]
    assert SDIST not in refused["why"]
    # Without the uv.lock, which is not committed, the lock has hashes alone.
    for file in locked.project.rglob("uv.lock"):
        file.unlink()
    assert "lib 1.0: a file is gone: sha256:" in online(locked, 5)["why"]
    index.remove(SDIST)
    assert "lib 1.0: the index does not have the release" in online(locked, 5)["why"]


@pytest.mark.parametrize("form", ["json", "html"])
def test_a_file_that_was_replaced_or_yanked(locked: Any, index: SimpleIndex, tmp_path: Path, form: str) -> None:
    if form == "html":
        as_html(index, "../../files/")
    assert "yanked" not in online(locked).stderr
    index.yank(SDIST)
    if form == "html":
        as_html(index, "../../files/")
    assert "lib 1.0 is yanked" in online(locked).stderr
    other = make_wheel(tmp_path / "other", "lib", "1.0", ANY, module="other = 1\n")
    index.add(other, OLD)
    if form == "html":
        as_html(index, "../../files/")
    digest = hashlib.sha256(other.read_bytes()).hexdigest()
    assert f"{WHEEL} was replaced: locked sha256:" in (why := online(locked, 5)["why"])
    assert f"now sha256:{digest}" in why


@pytest.mark.slow
def test_a_busy_index_is_asked_again_and_not_for_ever(locked: Any, index: SimpleIndex) -> None:
    busy = [429, 503]
    index.special[PAGE] = lambda handler: bool(busy) and send(handler, busy.pop(), Retry_After="0")
    online(locked)
    assert busy == []
    asked = index.requested.count(PAGE)
    index.special[PAGE] = lambda handler: send(handler, 429, Retry_After="0")
    assert "HTTP 429" in online(locked, 10)["why"]
    assert index.requested.count(PAGE) - asked == 5
    index.special[PAGE] = lambda handler: send(handler, 503, Retry_After="86400")
    assert "HTTP 503" in online(locked, 10)["why"]


@pytest.mark.parametrize("status", [204, 206])
def test_a_success_without_the_whole_page_is_no_page(locked: Any, index: SimpleIndex, status: int) -> None:
    index.bodies[PAGE] = (status, "text/html", b"")
    assert f"HTTP {status}" in online(locked, 10)["why"]


def test_a_page_without_end_is_left(locked: Any, index: SimpleIndex) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        while True:  # until the reader goes
            handler.wfile.write(b" " * (1 << 20))

    index.special[PAGE] = endless
    assert "bytes" in online(locked, 10)["why"]


def test_a_redirect_does_not_get_the_password_of_another_host(locked: Any, index: SimpleIndex) -> None:
    seen: list[str | None] = []
    with simple_index() as other:
        # Another name of this machine is another host to whom a password was given.
        there = other.address.replace("127.0.0.1", "localhost")

        def answered(handler: BaseHTTPRequestHandler) -> bool:
            seen.append(handler.headers.get("Authorization"))
            page = index.answer(PAGE)
            assert page is not None
            send(handler, 200, Content_Type=page[1], Content_Length=str(len(page[2])))
            handler.wfile.write(page[2])
            return True

        other.special[PAGE] = answered
        index.password = "me:secret"
        locked.env |= {"UV_DEFAULT_INDEX": index.url.replace("://", "://me:secret@"), "no_proxy": "*", "NO_PROXY": "*"}
        index.special[PAGE] = lambda handler: send(handler, 302, Location=f"{there}{PAGE}")
        online(locked)
        assert seen == [None]
        # The same host is given it again.
        index.special[PAGE] = lambda handler: send(handler, 302, Location="../else/")
        index.bodies["/simple/else/"] = (200, "text/html", b"")
        assert "does not have the release" in online(locked, 5)["why"]


def test_what_is_no_page_of_an_index_is_an_error_with_words(locked: Any, index: SimpleIndex) -> None:
    for kind, body in (("application/json", b"[1"), ("application/json", b"[" * 100_000), ("application/json", b"3")):
        index.bodies["/simple/lib/"] = (200, kind, body)
        assert "is not a page of a package index" in online(locked, 10)["what"]
