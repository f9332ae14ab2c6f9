"""Wheels from and for a remote store: a directory here; servers are in tests/integration."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.notes import Notes
from helpers.stores import keep_wheel
from unit.wheels.plans import compile_lock
from unit.wheels.test_key import PARTS
from unit.wheels.test_wheelhouse import taken, wanted

from envbuild import __version__
from envbuild.core.digests import short
from envbuild.core.errors import BuildError, NetworkError
from envbuild.core.progress import SilentReporter
from envbuild.store import entry_index
from envbuild.store.connect import open_remote
from envbuild.store.document import Document, describe
from envbuild.store.local import LocalStore
from envbuild.store.remote import Pushed, Remote
from envbuild.wheels.cache.entry import KIND, RECORD_FILE, Built, index_path_of, read_record
from envbuild.wheels.cache.wheelhouse import Wheelhouse
from envbuild.wheels.key import KeyParts


class Machine:
    """A machine with a store of its own, and a share that others have, too."""

    def __init__(self, folder: Path, share: Path, *, reads: bool = True, writes: bool = True) -> None:
        self.notes = Notes()
        self.folder = folder
        self.store = LocalStore(folder / "store", self.notes)
        self.remote: Remote = replace(open_remote(f"file://{share}"), reads=reads, writes=writes)
        self.wheelhouse = Wheelhouse(self.store, [self.remote])

    def keep(self, parts: KeyParts = PARTS, module: str = "", lock: str = "") -> Built:
        return keep_wheel(self.store, parts, self.folder, module=module, remotes=(self.remote,), lock=lock)

    def noted(self, *parts: str) -> bool:
        return any(all(part in line for part in parts) for line in self.notes.lines)


@pytest.fixture
def share(tmp_path) -> Path:
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


@pytest.fixture
def machine(tmp_path, share) -> Callable[..., Machine]:
    def make(name: str, **mode: bool) -> Machine:
        (tmp_path / name).mkdir(exist_ok=True)
        return Machine(tmp_path / name, share, **mode)

    return make


def never(_: Path) -> None:
    pytest.fail("it is there, and must not be built")


def test_wheel_of_one_machine_is_fetched_by_another(machine):
    one, two = machine("one"), machine("two")
    kept = one.keep(lock="sha256:lock")
    assert kept.pushed == {one.remote.address: "pushed"}
    found = two.wheelhouse.find(PARTS.key)
    assert found is not None
    assert (found.record, found.fetched, found.built) == (kept.record, two.remote.address, False)
    assert {path.name for path in found.path.iterdir()} == {
        *(kept.record.file, "wheel.json", "provenance.json", "build.log", entry_index.ENTRY_INDEX_FILE)
    }
    assert found.wheel.read_bytes() == kept.wheel.read_bytes()
    assert entry_index.find_damage(found.path) == ""
    shutil.rmtree(two.remote.address.removeprefix("file://"))
    again = two.wheelhouse.find(PARTS.key)
    assert again is not None, "it is a local entry now"
    assert again.fetched == ""
    assert two.wheelhouse.problems() == {}
    assert not two.wheelhouse.get_or_build(PARTS.key, never).built


def test_entry_names_its_builder_and_no_folder_of_the_machine(machine):
    one = machine("one")
    kept = one.keep(lock="sha256:lock")
    provenance = kept.provenance()
    assert provenance is not None
    assert (provenance.envbuild, provenance.lock) == (__version__, "sha256:lock")
    assert provenance.toolchain == {
        "cuda_toolkit": "13.0.88",
        "host_compiler": "g++ 12.2.0",
        "nvcc_front": PARTS.nvcc_front,
        "toolkit": "system",
    }
    assert provenance.built.endswith("Z")
    log = (kept.path / "build.log").read_text()
    assert log == "compiled in STORE/staging with ~/bin/nvcc from https://***@example.org/\n"
    texts = [path.read_text() for path in kept.path.iterdir() if path.suffix in (".json", ".log")]
    assert not [
        text for text in texts for place in (str(one.folder), str(Path.home()) + "/", "secret") if place in text
    ]


def test_failed_push_is_reported_and_the_wheel_is_kept(machine, share):
    one = machine("one")
    shutil.rmtree(share)
    kept = one.keep()
    assert kept.built
    assert kept.wheel.is_file()
    assert kept.pushed[one.remote.address].startswith("failed: ")
    command = f"envbuild wheels push {short(PARTS.key)} --store {one.remote.name}"
    assert one.noted("warning", kept.record.file, "There is no such directory", command)
    share.mkdir()
    assert one.wheelhouse.remote.push(one.remote, kept) is Pushed.NEW


def test_a_build_that_fails_pushes_nothing(machine):
    one = machine("one")

    def fail(_: Path) -> None:
        raise BuildError("no")

    with pytest.raises(BuildError):
        one.wheelhouse.get_or_build(PARTS.key, fail)
    assert one.remote.keys(KIND) == []
    assert one.wheelhouse.find(PARTS.key) is None


def test_a_store_that_is_not_there_stops_before_anything_is_built(machine, share):
    share.rmdir()
    with pytest.raises(NetworkError):
        machine("one").wheelhouse.find(PARTS.key)


def test_own_wheel_stays_where_the_first_is_damaged(machine, share):
    machine("one").keep(module="first = 1\n")
    for blob in (share / "blobs/sha256").iterdir():
        blob.write_bytes(b"?")
    two = machine("two")
    assert two.wheelhouse.find(PARTS.key) is None
    assert two.noted("not taken")
    second = two.keep(module="second = 2\n")
    assert second.pushed[two.remote.address].startswith("failed: ")
    assert "second" in second.wheel.read_bytes().decode(errors="replace")
    assert two.wheelhouse.problems() == {}
    assert two.noted("warning", "not pushed")
    assert two.wheelhouse.remote.push(two.remote, second, replace=True) is Pushed.REPLACED
    found = machine("three").wheelhouse.find(PARTS.key)
    assert found is not None
    assert found.record.digest == second.record.digest
    assert two.wheelhouse.remote.push(two.remote, second, replace=True) is Pushed.SAME, "a good one is not replaced"


OTHER = PARTS.model_copy(update={"sm": ("80",)})


def put(remote: Remote, key: str, folder: Path, **changes: object) -> None:
    """An entry put into a store by hand, as a whole: every digest in it is right."""
    record = json.loads((folder / RECORD_FILE).read_text())
    document = describe(KIND, key, index_path_of(read_record(folder).parts), folder, record)
    document = Document.model_validate({**document.model_dump(by_alias=True), **changes})
    for file in document.files:
        remote.backend.upload(folder / file.name, file.digest, file.size_bytes)
    assert remote.backend.create(KIND, key, document.index_path, document.as_bytes(), document.files)


def change(folder: Path, **fields: object) -> None:
    record = json.loads((folder / RECORD_FILE).read_text())
    (folder / RECORD_FILE).write_text(json.dumps({**record, **fields}))


def forged_parts(folder: Path, remote: Remote) -> None:
    """Another wheel's record that states this key."""
    parts = OTHER.model_dump(mode="json")
    change(folder, parts=parts)
    document = describe(KIND, PARTS.key, index_path_of(PARTS), folder, json.loads((folder / RECORD_FILE).read_text()))
    for file in document.files:
        remote.backend.upload(folder / file.name, file.digest, file.size_bytes)
    remote.backend.create(KIND, PARTS.key, document.index_path, document.as_bytes(), document.files)


def another_wheel(folder: Path, remote: Remote) -> None:
    (wheel,) = folder.glob("*.whl")
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"?")
    put(remote, PARTS.key, folder)


def another_name(folder: Path, remote: Remote) -> None:
    (wheel,) = folder.glob("*.whl")
    wheel.rename(folder / "other-1.7.0-cp310-cp310-linux_x86_64.whl")
    change(folder, file="other-1.7.0-cp310-cp310-linux_x86_64.whl")
    put(remote, PARTS.key, folder)


def a_path_as_name(folder: Path, remote: Remote) -> None:
    change(folder, file="../wheel-1.7.0-py3-none-any.whl")
    put(remote, PARTS.key, folder)


def a_strange_file(folder: Path, remote: Remote) -> None:
    (folder / "sitecustomize.py").write_text("")
    put(remote, PARTS.key, folder)


def gpu_code_that_is_not_there(folder: Path, remote: Remote) -> None:
    change(folder, sm=["90"])
    put(remote, PARTS.key, folder)


def another_record_outside(folder: Path, remote: Remote) -> None:
    put(remote, PARTS.key, folder, record={"key": PARTS.key})


def no_record(folder: Path, remote: Remote) -> None:
    document = describe(KIND, PARTS.key, index_path_of(PARTS), folder, {})
    files = [file for file in document.files if file.name != RECORD_FILE]
    put(remote, PARTS.key, folder, files=[file.model_dump() for file in files])


def bodies_of_another(folder: Path, remote: Remote) -> None:
    """Key A's content under key B."""
    for path in folder.iterdir():
        path.unlink()
    other = keep_wheel(LocalStore(folder.parent / "other", SilentReporter()), OTHER, folder.parent)
    for path in other.path.iterdir():
        shutil.copy(path, folder)
    put(remote, PARTS.key, folder)


FORGERIES = {
    forged_parts: "its parts have another key",
    another_wheel: "is not the wheel that its record is about",
    another_name: "is not a wheel of causal-conv1d 1.7.0",
    a_path_as_name: "is not a wheel of causal-conv1d 1.7.0",
    a_strange_file: "do not belong to a wheel: sitecustomize.py",
    gpu_code_that_is_not_there: "it contains no GPU code, which differs from its record",
    another_record_outside: "Its document differs from its record",
    no_record: "wheel.json",
    bodies_of_another: "it has another key",
}


@pytest.mark.parametrize(("forge", "message"), FORGERIES.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_forged_entry_is_refused_and_built_again(machine, tmp_path, forge, message):
    kept = keep_wheel(LocalStore(tmp_path / "good", SilentReporter()), PARTS, tmp_path)
    folder = tmp_path / "forged"
    shutil.copytree(kept.path, folder)
    one = machine("one")
    forge(folder, one.remote)
    assert one.wheelhouse.find(PARTS.key) is None
    assert one.noted("not taken", short(PARTS.key), message), one.notes.lines
    assert one.wheelhouse.entries() == []
    staging = one.store.root / "staging"
    assert not [*staging.iterdir()]
    built = one.keep()
    assert built.built, "the way to build it is free"
    assert one.wheelhouse.problems() == {}


def test_a_swapped_entry_is_taken_from_the_remote_store(machine, tmp_path, monkeypatch):
    lock = compile_lock(tmp_path / "lock")
    first, second = machine("first"), machine("second")
    parts = wanted(lock)
    kept = first.keep(parts)
    stranger = second.keep(parts.model_copy(update={"sm": ("80",)}))
    stranger.path.rename(second.store.path_of(KIND, parts.key))
    found = second.wheelhouse.find(parts.key)
    assert found is not None
    assert (found.fetched, found.record.digest) == (second.remote.address, kept.record.digest)
    shutil.rmtree(found.path)
    stranger = second.keep(parts.model_copy(update={"sm": ("80",)}))
    stranger.path.rename(second.store.path_of(KIND, parts.key))
    taken_there = taken(lock, second.store, monkeypatch, remotes=(second.remote,))
    assert {name: item.record.key for name, item in taken_there.items()} == {"causal-conv1d": parts.key}


def test_a_lock_takes_wheels_that_only_a_remote_store_has(machine, tmp_path, monkeypatch):
    lock = compile_lock(tmp_path / "lock")
    parts = wanted(lock)
    one, two = machine("one"), machine("two")
    older = one.keep(parts.model_copy(update={"cuda_toolkit": "13.0.5"}))
    newer = one.keep(parts.model_copy(update={"cuda_toolkit": "13.0.99"}))
    one.keep(parts.model_copy(update={"cuda_toolkit": "13.1.1"}))
    one.keep(parts.model_copy(update={"sm": ("80",)}))

    def takes(compilers: object = None) -> str:
        found = taken(lock, two.store, monkeypatch, compilers=compilers, notes=two.notes, remotes=[two.remote])
        assert set(found) == {"causal-conv1d"}
        return found["causal-conv1d"].record.key

    assert takes() == newer.record.key
    assert [item.record.key for item in two.wheelhouse.all()] == [newer.record.key], "the others stay where they are"
    exact = one.keep(parts)
    assert takes() == newer.record.key, "without compilers, what is here will do"
    from unit.wheels.test_plan import COMPILERS

    assert takes(COMPILERS) == exact.record.key
    shutil.rmtree(two.store.root)
    (tmp_path / "share/entries" / KIND / f"{newer.record.key.removeprefix('sha256:')}.json").write_text("{}")
    (tmp_path / "share/entries" / KIND / f"{exact.record.key.removeprefix('sha256:')}.json").unlink()
    assert takes() == older.record.key
    assert two.noted("not taken", "cannot be read")
