"""A lock directory is read back as it was written, or refused."""

from pathlib import Path

import pytest
from helpers.locks import MAIN, make_lock

from envbuild.catalog.stack import Phase
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, ConfigurationError, MachineError
from envbuild.lock.lockdir import tidy
from envbuild.lock.lockfile import content_digest, read_lock
from envbuild.lock.models import LockedComponent, LockedTorch
from envbuild.lock.requirement_lines import read_pins


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "lockfiles" / "mcore" / "debian12"


def test_a_lock_is_read_as_it_was_written(path):
    lock = make_lock(path)
    directory = read_lock(path)
    assert (directory.lock, directory.path) == (lock, path)
    assert directory.packages() == {"megatron-core": "0.16.1", "torch": "2.13.0+cpu", "uvicorn": "0.30"}
    assert directory.file("main") == path / "main.txt"
    # Without packages there is no file to install.
    assert directory.file("compile") is None
    assert directory.file("no-such-phase") is None


def tamper(path: Path, name: str, old: str, new: str) -> None:
    text = (path / name).read_text()
    assert old in text
    (path / name).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("main.txt", "0.16.1", "0.16.2", "main.txt: the record states sha256:"),
        ("main.txt", "sha256:aa", "sha256:ab", "main.txt: the record states sha256:"),
        ("compile.txt", "# empty", "evil==1", "compile.txt: the record states sha256:"),
        ("stack.lock.toml", 'version = "0.16.1"', 'version = "0.16.2"', "its digest is sha256:"),
        ("stack.lock.toml", 'build = "cpu"', 'build = "cu130"', "its digest is sha256:"),
        ("stack.lock.toml", 'file = "main.txt"', 'file = "../../../main.txt"', "allowed: 'main.txt'"),
        ("stack.lock.toml", 'file = "main.txt"', 'file = "git.txt"', "allowed: 'main.txt'"),
        ("stack.lock.toml", "[phases.git]", "[phases.other]", "phase other names the file 'git.txt'"),
    ],
)
def test_changed_file_is_refused_with_the_way_out(path, name, old, new, problem):
    make_lock(path)
    tamper(path, name, old, new)
    with pytest.raises(CheckRefusedError, match="was changed after it was made") as caught:
        read_lock(path)
    assert caught.value.exit_code == 5
    assert problem in caught.value.why
    assert "--upgrade" in caught.value.fix


def test_record_and_file_changed_together_are_refused(path):
    make_lock(path)
    tamper(path, "main.txt", "0.16.1", "0.16.2")
    tamper(path, "stack.lock.toml", sha256_bytes(MAIN.encode()), sha256_bytes((path / "main.txt").read_bytes()))
    with pytest.raises(CheckRefusedError) as caught:
        read_lock(path)
    assert caught.value.why.startswith("stack.lock.toml: its digest is")


def test_missing_file_is_refused(path):
    make_lock(path)
    (path / "compile.txt").unlink()
    with pytest.raises(CheckRefusedError) as caught:
        read_lock(path)
    assert caught.value.why == "compile.txt is missing"


def test_missing_record_says_how_to_make_one(path):
    with pytest.raises(ConfigurationError, match="there is no lock") as caught:
        read_lock(path)
    assert "envbuild lock --stack mcore --base debian12" in caught.value.fix


@pytest.mark.parametrize(
    "damaged",
    [
        lambda text: b"",
        lambda text: text[:300],
        lambda text: text + b"[[[",
        lambda text: b"\xff\xfe",
        lambda text: text.replace(b"stack =", b"stak ="),
        lambda text: text.replace(b"envbuild.lock/1", b"other.lock/9"),
    ],
    ids=["empty", "cut", "more", "bytes", "key", "schema"],
)
def test_damaged_record_is_refused_with_the_way_out(path, damaged):
    make_lock(path)
    record = path / "stack.lock.toml"
    record.write_bytes(damaged(record.read_bytes()))
    with pytest.raises(CheckRefusedError, match="is damaged") as caught:
        read_lock(path)
    assert caught.value.why
    assert "version control" in caught.value.fix
    assert "--upgrade" in caught.value.fix


def test_record_of_a_newer_envbuild_says_so(path):
    make_lock(path)
    tamper(path, "stack.lock.toml", "envbuild.lock/1", "envbuild.lock/2")
    with pytest.raises(CheckRefusedError, match="written by a newer envbuild") as caught:
        read_lock(path)
    assert "envbuild.lock/2" in caught.value.why
    assert "Update envbuild" in caught.value.fix
    assert "--upgrade" not in caught.value.fix


def test_unreadable_record_is_not_reported_as_damaged(path, monkeypatch):
    make_lock(path)

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(MachineError, match="no permission to read"):
        read_lock(path)


def test_content_digest_names_what_is_installed_where(path):
    lock = make_lock(path)

    def digest(**changes: object) -> str:
        values = {"base_digest": lock.base.definition_digest, "torch": lock.torch, "components": lock.components}
        return content_digest(**{**values, "phases": lock.phases, **changes})  # type: ignore[arg-type]

    component = LockedComponent(asked="==1", version="1", phase=Phase.MAIN)
    assert digest() == digest(torch=lock.torch.model_copy(update={"found_in": "torch-index"})) == lock.digest
    different = [
        digest(base_digest="sha256:00"),
        digest(torch=LockedTorch(version="2.13.0+cpu", build="other", found_in="find-links")),
        digest(torch=LockedTorch(version="2.13.1+cpu", build="cpu", found_in="find-links")),
        digest(components={**lock.components, "more": component}),
        digest(components={"more": component}),
        digest(components={"more": component.model_copy(update={"phase": Phase.COMPILE})}),
        digest(phases={"main": lock.phases["main"]}),
        digest(environment={"A": "{venv}"}),
        digest(environment={"A": "{site_packages}"}),
        digest(files={"a/b": "1\n"}),
        digest(files={"a/b": "2\n"}),
    ]
    assert len({lock.digest, *different}) == len(different) + 1


def test_a_lock_without_variables_has_the_digest_of_the_time_before_there_were_any(path):
    lock = make_lock(path)
    assert lock.digest == "sha256:f2b6d33434296b12945d600fcf1159b6f3ceb5cae4923d803a2914515233e55f"
    assert content_digest(lock.base.definition_digest, lock.torch, lock.components, lock.phases, {}) == lock.digest
    record = (path / "stack.lock.toml").read_text()
    assert "environment" not in record
    assert "files" not in record


def test_variables_are_those_of_the_place_where_the_environment_is(path):
    values = {"CUDA_HOME": "{site_packages}/nvidia/cu13", "B": "{venv}/b:{venv}", "A": "1"}
    lock = make_lock(path).model_copy(update={"environment": values})
    assert list(lock.variables("/opt/venv").items()) == [
        ("A", "1"),
        ("B", "/opt/venv/b:/opt/venv"),
        ("CUDA_HOME", "/opt/venv/lib/python3.11/site-packages/nvidia/cu13"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch==2.13.0+cpu \\\n    --hash=sha256:aa\n", {"torch": "2.13.0+cpu"}),
        ("a==1 ; python_version < '3'\n", {"a": "1"}),
        ("a[x,y]==1.0.post1\n", {"a": "1.0.post1"}),
        ("# comment==1\n    # via b==2\n    --hash=sha256:c==3\n\n", {}),
        ("a==1\nB.c==2\n", {"a": "1", "b-c": "2"}),
    ],
)
def test_read_pins(text, expected):
    assert read_pins(text) == expected


def test_tidy_brings_back_the_lock_of_a_process_killed_between_two_renames(path):
    make_lock(path)
    old = path.parent / ".debian12.old.abc"
    old.mkdir()
    path.rename(old / path.name)
    (path.parent / ".debian12.new.def").mkdir()
    make_lock(path.parent / "debian12.other")
    tidy(path)
    assert read_lock(path).lock.stack == "mcore"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["debian12", "debian12.other"]


def test_tidy_keeps_the_new_lock(path):
    make_lock(path)
    make_lock(path.parent / ".debian12.old.abc" / "debian12", stack="old")
    tidy(path)
    assert read_lock(path).lock.stack == "mcore"
    assert [entry.name for entry in path.parent.iterdir()] == ["debian12"]
