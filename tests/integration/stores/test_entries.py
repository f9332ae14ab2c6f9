"""What goes into a remote store and comes back: real registries, S3 services, directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.processes import wait_until
from helpers.store_entries import BIG, INDEX_PATH, KEY, OTHER_KEY, Place, content, entry, fetched, push

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError
from envbuild.store import repository
from envbuild.store.connect import open_remote
from envbuild.store.remote import Pushed

pytestmark = pytest.mark.usefixtures("own_account")


def test_what_was_pushed_is_fetched(place: Place, tmp_path: Path) -> None:
    remote = place.open()
    assert remote.find("things", KEY) is None
    assert remote.keys("things") == []
    assert remote.list_index("things", ()) == []
    made = entry(tmp_path / "made")
    assert push(remote, made) is Pushed.NEW
    document = fetched(place.open(), tmp_path / "got")
    assert content(tmp_path / "got") == {"small.txt": b"content", "inner/big.bin": BIG}
    assert (document.key, document.record) == (KEY, {"about": "it"})
    assert push(remote, made) is Pushed.SAME
    assert push(remote, made, OTHER_KEY) is Pushed.NEW
    assert remote.keys("things") == sorted([KEY, OTHER_KEY])
    assert remote.keys("others") == []
    assert [ref.key for ref in remote.list_index("things", ("sdist",))] == sorted([KEY, OTHER_KEY])
    assert {ref.index_path for ref in remote.list_index("things", INDEX_PATH)} == {INDEX_PATH}
    assert remote.list_index("things", ("sdi",)) == []
    assert set(remote.documents("things", [KEY, OTHER_KEY, sha256_bytes(b"none")])) == {KEY, OTHER_KEY}


WRITER = """
import sys
from pathlib import Path
from envbuild.store.connect import open_remote
url, endpoint, folder, key = sys.argv[1:]
remote = open_remote(url, endpoint=endpoint or None)
print("ready", flush=True)
sys.stdin.readline()
print(remote.push("things", key, ("sdist", "fit"), Path(folder), {"about": "it"}).value)
"""


def test_of_many_writers_at_once_one_wins_and_the_others_know(place: Place, tmp_path: Path) -> None:
    """Processes of their own, as machines are."""
    running = {}
    for name in ("one", "two", "three"):
        folder = entry(tmp_path / name, name, b"small")
        command = [sys.executable, "-c", WRITER, place.url, place.endpoint or "", str(folder), KEY]
        running[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for process in running.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    results = {name: process.communicate("\n", timeout=300)[0].strip() for name, process in running.items()}
    fetched(place.open(), tmp_path / "got")
    winner = (tmp_path / "got/small.txt").read_text()
    assert sorted(results.values()) == [*[Pushed.OTHER.value] * 2, Pushed.NEW.value]
    assert results[winner] == Pushed.NEW.value
    assert place.open().keys("things") == [KEY]


def test_a_registry_where_two_come_within_the_moment_keeps_one(
    oci: Place, registry_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put of one is held back until the other has put: that one notices that its entry is not the one."""
    monkeypatch.setattr(repository, "SETTLE_SECONDS", 0.5)
    behind = open_remote(oci.url.replace(oci.proxy.host, registry_address.removeprefix("http://")))
    held = threading.Event()

    def hold() -> None:
        held.set()
        wait_until(lambda: behind.find("things", KEY))

    oci.proxy.add(method="PUT", path="manifests/things-", times=1, hold=hold)
    results: dict[str, Pushed] = {}

    def late() -> None:
        results["late"] = push(oci.open(), entry(tmp_path / "late", "late"))

    thread = threading.Thread(target=late)
    thread.start()
    assert held.wait(300)
    results["early"] = push(oci.open(), entry(tmp_path / "early", "early"))
    thread.join()
    assert results == {"late": Pushed.NEW, "early": Pushed.OTHER}
    fetched(oci.open(), tmp_path / "got")
    assert (tmp_path / "got/small.txt").read_text() == "late"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param({"swap": os.urandom(len(BIG))}, "has another digest", id="swapped"),
        pytest.param({"keep": 1000}, "has 1000 bytes instead of 3000000", id="truncated"),
        pytest.param({"status": 404}, "inner/big.bin is missing there", id="missing"),
    ],
)
def test_a_file_that_is_another_is_refused(served: Place, tmp_path: Path, spoil: dict[str, object], said: str) -> None:
    push(served.open(), entry(tmp_path / "made"))
    served.proxy.add(method="GET", path=sha256_bytes(BIG).removeprefix("sha256:"), **spoil)
    with pytest.raises(CheckRefusedError) as refused:
        fetched(served.open(), tmp_path / "got")
    assert said in refused.value.why
    assert "--replace" in refused.value.fix


def test_the_document_of_another_entry_is_refused(place: Place, tmp_path: Path) -> None:
    """Key A's entry, put under key B by hand."""
    remote = place.open()
    push(remote, entry(tmp_path / "made"))
    document = remote.backend.read("things", KEY)
    found = remote.find("things", KEY)
    assert document is not None
    assert found is not None
    assert remote.backend.create("things", OTHER_KEY, INDEX_PATH, document, found.files)
    with pytest.raises(CheckRefusedError) as refused:
        remote.find("things", OTHER_KEY)
    assert "kept under another name" in refused.value.why
    (problem,) = remote.documents("things", [OTHER_KEY]).values()
    assert isinstance(problem, CheckRefusedError)
    with pytest.raises(CheckRefusedError):
        push(remote, tmp_path / "made", OTHER_KEY)
    assert push(remote, tmp_path / "made", OTHER_KEY, replace=lambda found: found is None) is Pushed.REPLACED
    assert remote.find("things", OTHER_KEY) is not None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": "envbuild.entry/2"}',
        json.dumps(
            {
                "schema": "envbuild.entry/1",
                "kind": "things",
                "key": KEY,
                "shelf": [],
                "record": {},
                "files": [{"name": "../../escaped", "digest": KEY, "size_bytes": 1}],
            }
        ).encode(),
    ],
    ids=["empty", "no JSON", "no object", "a later schema", "a file outside"],
)
def test_a_document_that_is_none_is_refused(tmp_path: Path, raw: bytes) -> None:
    remote = open_remote(f"file://{tmp_path}")
    remote.backend.create("things", KEY, INDEX_PATH, raw, ())
    with pytest.raises(CheckRefusedError, match="is refused"):
        remote.find("things", KEY)


def test_a_large_file_comes_back_whole(s3: Place, tmp_path: Path) -> None:
    """In parts, as obstore sends what is larger than a chunk."""
    big = os.urandom(19 << 20)
    push(s3.open(), entry(tmp_path / "made", big=big))
    assert s3.proxy.count("PUT", "partNumber") > 1
    fetched(s3.open(), tmp_path / "got")
    assert (tmp_path / "got/inner/big.bin").read_bytes() == big
