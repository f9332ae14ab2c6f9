"""Where torch's build is: folders, pages and indexes, the first that has it; else an error that names them all."""

import base64
import contextlib
import functools
import http.server
import threading
from pathlib import Path

import pytest
from helpers.loopback import serving
from helpers.sites import site_of

from envbuild.core.errors import NetworkError
from envbuild.lock.uv.torch_builds import TorchSource, torch_source

WHEEL = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
NOWHERE = "http://127.0.0.1:9/whl/{build}"  # the discard port, on which no program listens


def find(*find_links: object, index: str = NOWHERE, version="==2.13.0", build="cpu", python="3.11") -> TorchSource:
    return torch_source(site_of(find_links=tuple(map(str, find_links)), torch_index=index), version, build, python)


@pytest.fixture
def wheels(tmp_path) -> Path:
    folder = tmp_path / "some wheels"
    folder.mkdir()
    (folder / WHEEL).touch()
    return folder


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, pages: dict[str, str], asked: list[tuple[str, str | None]], *args: object) -> None:
        self.pages, self.asked = pages, asked
        super().__init__(*args)

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        page = self.pages.get(self.path)
        self.send_response(200 if page is not None else 404)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve(pages: dict[str, str]):
    """A web server on loopback; gives its address and what it was asked for."""
    asked: list[tuple[str, str | None]] = []
    with serving(functools.partial(Handler, pages, asked)) as server:
        yield f"127.0.0.1:{server.server_port}", asked


def link(wheel: str) -> str:
    return f'<a href="/files/{wheel}#sha256=0">{wheel}</a>'


def test_index_build_is_looked_for_nowhere():
    assert find(build="index") == TorchSource("package-index", None)


def test_local_folder(wheels):
    source = find(wheels)
    assert source == TorchSource("find-links", str(wheels))
    assert source.folder() == wheels
    assert source.uv_args() == ["--find-links", str(wheels)]


@pytest.mark.parametrize("place", ["{url}", "some wheels", "~/some wheels"])
def test_local_folder_is_made_absolute(wheels, monkeypatch, place):
    """uv runs in another directory."""
    monkeypatch.chdir(wheels.parent)
    monkeypatch.setenv("HOME", str(wheels.parent))
    assert find(place.format(url=wheels.as_uri())) == TorchSource("find-links", str(wheels))


def test_first_place_that_has_it_wins(wheels, tmp_path):
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / WHEEL).touch()
    assert find(tmp_path / "empty", other, wheels).location == str(other)


@pytest.mark.parametrize("plus", ["+", "%2B", "%2b"])
def test_page(plus):
    with serve({"/wheels/": link(WHEEL.replace("+", plus))}) as (address, _):
        place = f"http://{address}/wheels/"
        source = find(place)
    assert source == TorchSource("find-links", place)
    assert source.folder() is None
    assert source.uv_args() == ["--find-links", place]


@pytest.mark.parametrize("slash", ["", "/"])
def test_index(tmp_path, slash):
    with serve({"/whl/cpu/torch/": link(WHEEL.replace("+", "%2B"))}) as (address, _):
        source = find(tmp_path, index=f"http://{address}/whl/{{build}}{slash}")
    assert source == TorchSource("torch-index", f"http://{address}/whl/cpu{slash}")
    assert source.folder() is None
    assert source.uv_args()[:2] == ["--index", source.location]


def test_index_without_a_place_for_the_build_and_with_other_braces():
    with serve({"/%7Bteam%7D/torch/": link(WHEEL), "/{team}/torch/": link(WHEEL)}) as (address, _):
        assert find(index=f"http://{address}/{{team}}").kind == "torch-index"


def test_credentials_in_a_url_are_sent_and_masked():
    with serve({}) as (address, asked), pytest.raises(NetworkError) as caught:
        find(f"http://me:p%40ss@{address}/a/", index=f"http://me:p%40ss@{address}/b")
    token = base64.b64encode(b"me:p@ss").decode()
    assert asked == [("/a/", f"Basic {token}"), ("/b/torch/", f"Basic {token}")]
    assert "p%40ss" not in str(caught.value.as_json())
    assert f"http://***@{address}/a/" in caught.value.why


@pytest.mark.parametrize(
    "name",
    [
        "torch-2.12.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.13.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl",
        "torch-2.13.0+cpu-cp311-cp311t-manylinux_2_28_x86_64.whl",
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_aarch64.whl",
        "torch-2.13.0+cpu-cp311-cp311-macosx_11_0_arm64.whl",
        "torch-2.13.0+cpu.tar.gz",
        "torch-nonsense.whl",
        "torchvision-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
    ],
)
def test_wheel_that_does_not_fit_is_passed_over(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(NetworkError) as caught:
        find(tmp_path)
    assert f"find-links {tmp_path}: no torch ==2.13.0 +cpu for Python 3.11" in caught.value.why


@pytest.mark.parametrize(
    ("version", "build", "python", "name"),
    [
        (">=2.12,<3", "cpu", "3.11", WHEEL),
        ("==2.13.*", "cpu", "3.11", WHEEL),
        ("", "cpu", "3.11", WHEEL),
        ("==2.13.0", "cu130", "3.12", "torch-2.13.0+cu130-cp312-cp312-manylinux_2_28_x86_64.whl"),
        ("==2.14.0rc1", "cpu", "3.10", "torch-2.14.0rc1+cpu-cp310-cp310-linux_x86_64.whl"),
    ],
)
def test_wheel_that_fits(tmp_path, version, build, python, name):
    (tmp_path / name).touch()
    assert find(tmp_path, version=version, build=build, python=python).kind == "find-links"


def test_nothing_found_names_every_place_tried_and_the_way_out(tmp_path):
    (tmp_path / "empty").mkdir()
    with serve({"/page/": "no links"}) as (address, _), pytest.raises(NetworkError) as caught:
        find(tmp_path / "missing", tmp_path / "empty", f"http://{address}/page/", f"http://{address}/gone/")
    error = caught.value
    assert "no place has torch ==2.13.0 as its +cpu build for Python 3.11" in error.what
    assert error.why.splitlines()[1:5] == [
        f"  find-links {tmp_path}/missing: no such folder",
        f"  find-links {tmp_path}/empty: no torch ==2.13.0 +cpu for Python 3.11",
        f"  find-links http://{address}/page/: no torch ==2.13.0 +cpu for Python 3.11",
        f"  find-links http://{address}/gone/: cannot be reached (HTTP 404 Not Found)",
    ]
    assert "index http://127.0.0.1:9/whl/cpu: cannot be reached (" in error.why.splitlines()[5]
    assert "--torch-build index" in error.fix
    assert "UV_FIND_LINKS" in error.fix


@pytest.mark.parametrize(
    "place", ["http://", "ftp://127.0.0.1:9/", "http://127.0.0.1:no-port/", "http://[::1/", "http://a b/"]
)
def test_malformed_url_is_reported_as_unreachable(place):
    with pytest.raises(NetworkError) as caught:
        find(place)
    assert f"find-links {place}: cannot be reached" in caught.value.why


def test_server_that_speaks_no_http_cannot_be_reached():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 hello\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NetworkError) as caught:
            find(f"http://127.0.0.1:{server.getsockname()[1]}/")
        thread.join()
    assert "cannot be reached" in caught.value.why
