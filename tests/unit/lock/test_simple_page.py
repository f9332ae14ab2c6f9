"""Pages of package indexes, and which indexes uv's settings name."""

import json
from email.message import Message

import pytest

from envbuild.lock.uv import fetch
from envbuild.lock.uv.fetch import Answer
from envbuild.lock.uv.index_settings import asked_indexes, built_in_index
from envbuild.lock.uv.simple_page import ListedFile, parse_page, project_url

URL, HASH = "https://host/simple/lib/", "a" * 64
WHEEL = "lib-1.0%2Bcpu-py3-none-any.whl"
NAME = "lib-1.0+cpu-py3-none-any.whl"


def page(body, kind="text/html"):
    return parse_page(Answer(url=URL, content_type=kind, body=body.encode()))


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (f'<a href="../../files/{WHEEL}#sha256={HASH}">x</a>', ("https://host/files/", HASH, None)),
        (f"<A HREF='/f/{WHEEL}#md5=1' data-yanked>x</A>", ("https://host/f/", "", "")),
        (f'<base href="//cdn/"><a data-yanked="bad &gt; 1" href="{WHEEL}">', ("https://cdn/", "", "bad > 1")),
        (f'<!-- <a href="no.whl"> --><a>x</a><a href="{WHEEL}?x=1#sha256={HASH}', None),
    ],
)
def test_links_of_html(text, file):
    if file is None:
        assert page(text) == []
        return
    place, digest, yanked = file
    digest = digest and f"sha256:{digest}"
    assert page(text) == [ListedFile(name=NAME, url=f"{place}{WHEEL}", sha256=digest, yanked=yanked)]


@pytest.mark.parametrize(
    ("fields", "digest", "yanked"),
    [
        ({"hashes": {"sha256": HASH}, "yanked": False}, f"sha256:{HASH}", None),
        ({"hashes": {}, "yanked": True}, "", ""),
        ({"hashes": {"sha256": 1}, "yanked": "bad"}, "", "bad"),
    ],
)
def test_files_of_json(fields, digest, yanked):
    text = json.dumps({"files": [{"filename": NAME, "url": f"../f/{WHEEL}", **fields}]})
    place = "https://host/simple/f/"
    assert page(text, "application/vnd.pypi.simple.v1+json") == [
        ListedFile(name=NAME, url=f"{place}{WHEEL}", sha256=digest, yanked=yanked)
    ]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"files": 1}', '{"files": [1]}', '{"files": [{"filename": "x"}]}'])
def test_json_that_is_no_page(text):
    with pytest.raises(ValueError):
        page(text, "application/json")


def test_address_of_a_page(tmp_path):
    assert project_url("https://host/simple/", "Lib_A.b") == "https://host/simple/lib-a-b/"
    assert project_url(str(tmp_path), "lib") == f"file://{tmp_path}/lib/index.html"


@pytest.mark.parametrize(
    ("environ", "toml", "asked"),
    [
        ({}, "", [built_in_index()]),
        ({"UV_INDEX_URL": "https://old", "UV_DEFAULT_INDEX": "a=https://new"}, "", ["https://new"]),
        (
            {"UV_INDEX": "b=https://b https://c", "UV_INDEX_URL": "https://a"},
            "",
            ["https://b", "https://c", "https://a"],
        ),
        ({}, 'index-url = "https://a"\nextra-index-url = ["https://b"]', ["https://b", "https://a"]),
        (
            {"UV_EXTRA_INDEX_URL": "https://x"},
            '[[index]]\nurl = "https://a"\ndefault = true\n[[index]]\nurl = "https://b"\nexplicit = true',
            ["https://x", "https://a"],
        ),
    ],
)
def test_indexes_that_uv_asks(environ, toml, asked, tmp_path):
    (tmp_path / "uv.toml").write_text(toml)
    assert asked_indexes({"HOME": str(tmp_path), "UV_CONFIG_FILE": str(tmp_path / "uv.toml"), **environ}) == asked


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7), ("Thu, 01 Jan 1970 00:01:40 GMT", 60), ("Thu, 01 Jan 1970 00:00:01 GMT", 0), ("soon", 4), (None, 4)],
)
def test_when_a_busy_index_is_asked_again(text, seconds, monkeypatch):
    monkeypatch.setattr(fetch.time, "time", lambda: 40)
    headers = Message()
    if text is not None:
        headers["Retry-After"] = text
    assert fetch._seconds_to_wait(headers, attempt=3) == seconds


def test_uv_says_which_index_it_asks_by_itself() -> None:
    assert built_in_index().startswith("https://")
    assert built_in_index().endswith("/simple")
