"""Which lock a command takes: the project's own; the shipped one only for the definitions that it was made from."""

import contextlib
import dataclasses
import json

import pytest
from helpers.locks import inputs_of, make_lock, mcore_of
from helpers.notes import Notes

from envbuild.catalog.data import data_root
from envbuild.cli.main import run
from envbuild.core.errors import ConfigurationError, EnvbuildError
from envbuild.lock import lockdir
from envbuild.lock.inputs.request import is_older
from envbuild.lock.lockdir import find_lock, lock_command, with_locked_base
from envbuild.lock.lockfile import read_lock
from envbuild.lock.outcome import NewLock

ARGUMENTS = ("--stack", "mcore", "--target", "cpu", "--base", "debian12")


@pytest.fixture
def project(tmp_path, monkeypatch):
    path = tmp_path / "project"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    return path


@pytest.fixture
def shipped(tmp_path, project, monkeypatch):
    """An envbuild that comes with a lock of mcore, made from the stack and base that come with it."""
    path = tmp_path / "shipped" / "lockfiles" / "mcore" / "debian12"
    make_lock(path, inputs=inputs_of(mcore_of(project)))
    monkeypatch.setattr(lockdir, "data_root", lambda: tmp_path / "shipped")
    return path


def override(project, kind, name, old, new):
    """A definition of the project's own in the place of the shipped one."""
    own = project / "envs" / kind / f"{name}.toml"
    own.parent.mkdir(parents=True)
    text = (data_root() / "envs" / kind / f"{name}.toml").read_text()
    assert old in text
    own.write_text(text.replace(old, new))
    return own


def test_the_projects_own_lock_is_taken_also_when_it_is_older(project, shipped):
    own = project / "lockfiles" / "mcore" / "debian12"
    make_lock(own)
    actual = find_lock(project, mcore_of(project))
    assert actual.path == own
    assert is_older(actual.lock, mcore_of(project))


def test_the_shipped_lock_is_taken_for_the_shipped_definitions_and_a_copy_of_them(project, shipped):
    assert find_lock(project, mcore_of(project)).path == shipped
    override(project, "stacks", "mcore", "# Megatron-Core alone", "# Other words")
    assert find_lock(project, mcore_of(project)).path == shipped


def test_without_a_lock_it_says_how_to_make_one(project, shipped):
    selection = dataclasses.replace(mcore_of(project), base_name="ubuntu2204")
    with pytest.raises(ConfigurationError, match="there is no lock of stack mcore on base ubuntu2204") as caught:
        find_lock(project, selection)
    assert "envbuild lock --stack mcore --base ubuntu2204" in caught.value.fix


def test_without_a_base_the_one_with_the_lock_is_taken(project, monkeypatch):
    """Of several the default base's, else the newest; a named target limits them."""
    monkeypatch.setattr(lockdir, "data_root", lambda: project / "nothing")
    selection, reporter = mcore_of(project), Notes()

    def locked_on(base: str, day: str) -> None:
        other = dataclasses.replace(selection, base_name=base)
        record = {"inputs": inputs_of(other).model_copy(update={"as_of": f"{day}T00:00:00Z"})}
        made = make_lock(project / "lockfiles/mcore" / base)
        make_lock(project / "lockfiles/mcore" / base, base=made.base.model_copy(update={"name": base}), **record)

    def taken(target: str | None = None) -> tuple[str, str]:
        actual = with_locked_base(selection, "mcore", project, reporter, target=target)
        return actual.base_name, actual.target_name

    assert taken() == ("debian12", "cpu")
    locked_on("ubuntu2404-cu130", "2026-01-01")
    assert taken() == ("ubuntu2404-cu130", "h100")
    assert taken("cpu") == ("debian12", "cpu"), "target cpu has no lock"
    assert reporter.lines == [
        "note: no lock on the default base debian12: taking the one on ubuntu2404-cu130 (the only one)"
    ]
    locked_on("debian12-cu130", "2026-01-02")
    assert taken()[0] == "debian12-cu130"
    assert reporter.lines[-1].endswith("(the newest; others are on ubuntu2404-cu130)")
    (project / "lockfiles/mcore/debian12").mkdir()
    (project / "lockfiles/mcore/debian12/stack.lock.toml").write_text("damaged")
    assert taken() == ("debian12", "cpu")


@pytest.mark.parametrize(
    ("kind", "name", "old", "new", "named"),
    [
        ("stacks", "mcore", 'version = "==0.16.1"', 'version = "==0.16.0"', "stack mcore in {file}"),
        ("stacks", "mcore", "tensor, pipeline and", "other", "stack mcore in {file}"),
        ("bases", "debian12", "Debian 12", "Debian twelve", "base debian12 in {file}"),
    ],
)
def test_the_shipped_lock_is_refused_for_other_definitions(project, shipped, kind, name, old, new, named):
    file = override(project, kind, name, old, new)
    with pytest.raises(ConfigurationError, match="comes with envbuild is not for the definitions here") as caught:
        find_lock(project, mcore_of(project))
    assert caught.value.exit_code == 3
    assert named.format(file=file) in caught.value.why
    assert str(shipped) in caught.value.why
    assert str(project / "lockfiles" / "mcore" / "debian12") in caught.value.why
    assert caught.value.fix == "Make it: envbuild lock --stack mcore --base debian12"


def test_the_shipped_lock_is_refused_where_the_project_knows_of_another_conflict(project, shipped):
    own = project / "envs" / "conflicts" / "mine.toml"
    own.parent.mkdir(parents=True)
    own.write_text(
        'summary = "s"\nevidence = "e"\nfix = "f"\n[packages]\ntorch = "==2.13.0"\nmegatron-core = "==0.16.1"\n'
    )
    with pytest.raises(ConfigurationError) as caught:
        find_lock(project, mcore_of(project))
    assert f"the conflicts and companions in {project / 'envs'}" in caught.value.why
    # What trains wrongly decides no version of a lock.
    with own.open("a") as file:
        file.write('[shown_by]\nmatrix = "m"\ncase = "c"\n[[cases]]\ntensor = 2\n')
    assert find_lock(project, mcore_of(project)).path == shipped


def test_a_shipped_lock_of_another_name_is_held_to_its_own_stack(project, shipped):
    variant = shipped.parents[1] / "try1" / "debian12"
    make_lock(variant, inputs=inputs_of(mcore_of(project)))
    assert find_lock(project, mcore_of(project), "try1").path == variant
    override(project, "stacks", "mcore", '"==0.16.1"', '"==0.16.0"')
    with pytest.raises(ConfigurationError) as caught:
        find_lock(project, mcore_of(project), "try1")
    assert caught.value.fix.startswith("Make it: envbuild lock --stack mcore --base debian12 --name try1")


@pytest.mark.parametrize(
    ("made", "stack", "name", "what", "fix"),
    [
        ("try1/ubuntu2404", "mcore", "try1", "no lock of stack mcore on base debian12 named try1", "--name try1 (and"),
        ("try1/debian12", "nemo-2.7", "try1", "try1 on base debian12 is not of stack mcore", "--stack nemo-2.7 --name"),
        ("../elsewhere/debian12", "mcore", "../elsewhere", "is not a valid name of a lock", "small letters"),
    ],
)  # fmt: skip
def test_lock_of_a_name_that_cannot_be_taken(project, made, stack, name, what, fix):
    make_lock(project / "lockfiles" / made, stack=stack)
    with pytest.raises(EnvbuildError, match=what) as caught:
        find_lock(project, mcore_of(project), name)
    assert fix in caught.value.fix
    if made == "try1/ubuntu2404":
        assert caught.value.why.endswith("lockfiles/try1 has it on ubuntu2404.")


def test_command_of_a_lock_has_the_words_that_it_was_made_with(project):
    own = project / "lockfiles" / "mcore" / "debian12"
    make_lock(own)
    assert lock_command(read_lock(own)) == "envbuild lock --stack mcore --base debian12"
    inputs = inputs_of(mcore_of(project)).model_copy(
        update={
            "pins": {"torch": ">=2.12,<3"},
            "as_of_request": "2026-05-01",
            "torch_build_request": "index",
            "allow": ("glibc",),
        }
    )
    make_lock(project / "lockfiles" / "try1" / "debian12", inputs=inputs)
    words = "--pin 'torch=>=2.12,<3' --as-of 2026-05-01 --torch-build index --allow glibc"
    actual = lock_command(read_lock(project / "lockfiles" / "try1" / "debian12"))
    assert actual == f"envbuild lock --stack mcore --base debian12 --name try1 {words}"
    make_lock(project / "a place", inputs=inputs)
    assert f"--out '{project / 'a place'}' --pin" in lock_command(read_lock(project / "a place"))


@pytest.mark.parametrize(
    "command",
    [("image",), ("certify",), ("sync", "--into", "venv"), ("export", "--format", "requirements"), ("wheels",)],
    ids=lambda command: command[0],
)
def test_no_command_takes_a_shipped_lock_of_other_definitions(project, shipped, command, capsys):
    override(project, "stacks", "mcore", '"==0.16.1"', '"==0.16.0"')
    assert run([*command, *ARGUMENTS, "--quiet", "--json"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert "comes with envbuild is not for the definitions here" in error["what"]
    assert not (project / "out").exists()


def test_check_without_a_lock_of_the_projects_own_says_what_the_shipped_ones_are_for(project, shipped, capsys):
    assert run(["lock", "--check", "--stack", "mcore", "--json"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert "Locks that come with envbuild are meant for use" in error["why"]
    assert "--diff" in error["fix"]


def test_diff_without_a_lock_of_the_projects_own_compares_with_the_shipped_one(project, shipped, capsys, monkeypatch):
    """What it resolves is not of interest here: a lock of the other version stands in for it."""
    override(project, "stacks", "mcore", '"==0.16.1"', '"==0.16.0"')
    new = project.parent / "new"
    make_lock(new, main=(shipped / "main.txt").read_text() + "psutil==7.0.0 \\\n    --hash=sha256:dd\n")
    seen = []

    @contextlib.contextmanager
    def resolved(run, inputs, existing):
        seen.append(existing)
        yield NewLock(new, None)

    monkeypatch.setattr("envbuild.lock.lock.LockRun.new_lock", resolved)
    assert run(["lock", "--diff", *ARGUMENTS, "--json"]) == 0
    shown, output = capsys.readouterr()
    result = json.loads(shown)
    assert (result["path"], result["from"]) == (str(shipped), read_lock(shipped).lock.digest)
    assert [change["name"] for change in result["changes"]] == ["psutil"]
    assert [lock.path for lock in seen] == [shipped]
    assert "compared with the lock that comes with envbuild" in output
    make_lock(project / "lockfiles" / "mcore" / "debian12")
    assert run(["lock", "--diff", *ARGUMENTS, "--json"]) == 0
    shown, output = capsys.readouterr()
    assert json.loads(shown)["path"] == str(project / "lockfiles" / "mcore" / "debian12")
    assert "comes with envbuild" not in output


def test_the_difference_with_a_lock_that_is_not_there_names_the_command_that_makes_it(project, capsys):
    assert run(["lock", *ARGUMENTS, "--diff", "--name", "mine"]) == 3
    assert "envbuild lock --stack mcore --base debian12 --name mine" in capsys.readouterr().err


def test_a_base_that_another_stack_of_the_anchor_is_for_is_named_with_it(project, capsys):
    assert run(["lock", "--nemo", "2.7.3", "--base", "debian12-cu130"]) == 3
    assert "--stack nemo-2.7 --base debian12-cu130" in capsys.readouterr().err
    assert run(["lock", "--stack", "mcore", "--target", "h200", "--base", "debian12"]) == 3
    assert "--stack" not in capsys.readouterr().err.partition("help:")[2]
