"""A stack of a few lines that extends another one."""

import json
from pathlib import Path

import jsonschema
import pytest

from envbuild.catalog.catalog import Catalog, Selection, definition_digest
from envbuild.catalog.data import data_root
from envbuild.catalog.extends import merged
from envbuild.cli.group import run_command
from envbuild.cli.schema import schema_of
from envbuild.core import tomlread
from envbuild.core.errors import ConfigurationError
from envbuild.lock.inputs.request import inputs_digest, request_of
from envbuild.lock.lockfile import read_lock

MINE = 'extends = "mcore"\nsummary = "mine"\n[components.megatron-core]\nversion = "==0.15.3"\n'


def write(project: Path, name: str, text: str) -> Path:
    path = project / "envs/stacks" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(project: Path, name: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        Catalog.open(project).stack(name)
    return caught.value


def test_tables_merge_and_lists_replace(tmp_path: Path) -> None:
    builds = '[[builds]]\ntarget = "cpu"\nbases = ["debian12"]\n[components.extra]\nversion = "==1"\n'
    write(tmp_path, "mine", MINE + builds)
    catalog = Catalog.open(tmp_path)
    shipped, mine = catalog.stack("mcore"), catalog.stack("mine")
    assert (mine.summary, mine.driver, mine.matrix) == ("mine", shipped.driver, shipped.matrix)
    assert [entry.target for entry in mine.builds] == ["cpu"]
    core = shipped.components["megatron-core"]
    assert mine.components["megatron-core"] == core.model_copy(update={"version": "==0.15.3"})
    assert list(mine.components) == [*shipped.components, "extra"]
    assert mine.environment == shipped.environment


def test_its_digest_is_that_of_a_whole_file_that_says_the_same(tmp_path: Path) -> None:
    write(tmp_path, "mine", MINE)
    text = (data_root() / "envs/stacks/mcore.toml").read_text()
    whole = text.replace('"==0.16.1"', '"==0.15.3"').replace('summary = "', 'summary = "mine"\n# "', 1)
    write(tmp_path, "whole", whole)
    catalog = Catalog.open(tmp_path)
    assert definition_digest(catalog.stack("mine")) == definition_digest(catalog.stack("whole"))
    assert definition_digest(catalog.stack("mine")) != definition_digest(catalog.stack("mcore"))


def test_a_chain_of_stacks_takes_what_the_nearest_says(tmp_path: Path) -> None:
    write(tmp_path, "mine", MINE)
    write(tmp_path, "next", 'extends = "mine"\n[components.torch]\nversion = "==2.12.0"\n')
    stack = Catalog.open(tmp_path).stack("next")
    versions = {name: spec.version for name, spec in stack.components.items()}
    assert (versions["torch"], versions["megatron-core"], stack.summary) == ("==2.12.0", "==0.15.3", "mine")


def test_a_project_changes_the_shipped_stack_under_its_name(tmp_path: Path) -> None:
    write(tmp_path, "mcore", 'extends = "mcore"\n[components.torch]\nversion = "==2.12.0"\n')
    assert Catalog.open(tmp_path).stack("mcore").components["torch"].version == "==2.12.0"


def test_keys_that_say_the_same_replace_each_other() -> None:
    git = {"git": "u", "version": "==1", "extras": ["a"]}
    assert merged(git, {"ref": "main"}) == {"git": "u", "extras": ["a"], "ref": "main"}
    assert merged({"git": "u", "ref": "main"}, {"version": "==1"}) == {"git": "u", "version": "==1"}
    assert merged({"version": "==1"}, {"version": "==2", "ref": "m"}) == {"version": "==2", "ref": "m"}
    assert merged({"value_for_cuda": {"13": "a"}, "reason": "r"}, {"value": "b"}) == {"value": "b", "reason": "r"}


def test_a_cycle_is_refused_with_its_place(tmp_path: Path) -> None:
    first = write(tmp_path, "one", '# a\nextends = "two"\n')
    second = write(tmp_path, "two", 'extends = "one"\n')
    error = refused(tmp_path, "one")
    assert error.what == f"{second.resolve()}:1: stack two extends itself"
    assert error.why == "one extends two extends one."
    write(tmp_path, "one", '# a\nextends = "one"\n')
    assert refused(tmp_path, "one").what == f"{first.resolve()}:2: stack one extends itself"


def test_an_unknown_stack_is_refused_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "mine", '\nextends = "mcor"\n')
    error = refused(tmp_path, "mine")
    assert error.what == f"{path.resolve()}:2: there is no stack 'mcor'"
    assert "Did you mean 'mcore'?" in error.why


def test_what_is_wrong_is_named_where_it_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, "mine", 'extends = "mcore"\n[components.torch]\nversoin = "==1"\n')
    error = refused(tmp_path, "mine")
    assert error.what.startswith(f"{path.resolve()}:3: ")
    assert "components.torch.versoin: unknown key; did you mean 'version'?" in error.why
    write(tmp_path, "next", 'extends = "mine"\n')
    assert refused(tmp_path, "next").what == error.what
    write(tmp_path, "mine", 'extends = "mcore"\nmatrix = "x"\n')
    assert refused(tmp_path, "mine").what == f"{path.resolve()}:2: there is no matrix 'x'"


@pytest.mark.parametrize("value", ["1", '["mcore"]', '"../mcore"', '"mcore.toml/"', '"Mcore"', '""'])
def test_extends_takes_the_name_of_one_stack(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, "mine", f"\nextends = {value}\n")
    error = refused(tmp_path, "mine")
    assert error.what == f"{path.resolve()}:2: extends takes the name of one stack"
    assert "`envbuild list stacks`" in error.fix


@pytest.mark.parametrize(
    ("table", "near"),
    [
        ("components.megatron-cor", "megatron-core"),
        # Of another stack.
        ("components.nemo-toolkt", "nemo-toolkit"),
        ("requirements.numppy", "numpy"),
        ("environment.CUDA_DEVICE_MAX_CONECTIONS", "CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
)
def test_a_misspelt_table_is_refused_where_it_would_add_one(tmp_path: Path, table: str, near: str) -> None:
    under = MINE + '[requirements.numpy]\nreason = "r"\n'
    write(tmp_path, "under", under + '[environment.CUDA_DEVICE_MAX_CONNECTIONS]\nvalue = "1"\nreason = "r"\n')
    key = 'value = "2"' if "environment" in table else 'version = ">=1"' if "requirements" in table else "modules = []"
    path = write(tmp_path, "mine", f'extends = "under"\n[{table}]\n{key}\n')
    error = refused(tmp_path, "mine")
    assert error.what == f"{path.resolve()}:2: {table} changes nothing of stack under"
    assert f"Did you mean {near!r}?" in error.why


def test_a_table_of_its_own_is_added(tmp_path: Path) -> None:
    own = (
        '[components.megatron-cor]\nversion = "==1"\n[components.torchh]\ngit = "u"\n[components.apex]\n'
        '[components.transformer-engine-torch]\nphase = "compile"\n[requirements.numppy]\nreason = "r"\n'
    )
    write(tmp_path, "under", MINE + '[requirements.numpy]\nreason = "r"\n[components.transformer-engine]\n')
    write(tmp_path, "mine", f'extends = "under"\n{own}')
    stack = Catalog.open(tmp_path).stack("mine")
    assert {"megatron-cor", "torchh", "apex", "transformer-engine-torch"} <= stack.components.keys()
    assert {"numppy", "numpy"} <= stack.requirements.keys()


def test_the_schema_knows_it() -> None:
    check = jsonschema.Draft202012Validator(schema_of("stacks"))
    assert check.is_valid(json.loads(json.dumps(tomlread.loads(MINE))))
    assert not check.is_valid({"summary": "no stack to extend"})
    assert not check.is_valid({"extends": "mcore", "componets": {}})


def test_shipped_locks_have_the_inputs_that_they_were_made_from() -> None:
    catalog = Catalog.open(Path("/nonexistent"))
    for record in sorted((data_root() / "lockfiles").glob("*/*/stack.lock.toml")):
        lock = read_lock(record.parent).lock
        selection = Selection(catalog, lock.stack, lock.base.name, "cpu")
        assert lock.inputs.digest == inputs_digest(selection, request_of(lock)), record


def test_list_shows_what_a_stack_extends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "mine", MINE)
    monkeypatch.chdir(tmp_path)
    assert run_command(["list", "stacks"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(
        line.startswith("mine ") and "  mine  (extends mcore)  [envs/stacks/mine.toml]" in line for line in lines
    )
