"""The wheelhouse: entries, what is wrong with them, and which of them fit a lock and a target."""

from pathlib import Path

import pytest
from helpers.notes import Notes
from helpers.stores import keep_wheel
from unit.wheels.plans import compile_lock
from unit.wheels.test_plan import COMPILERS, CPU, GPU, Declared

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.core.digests import short
from envbuild.core.errors import ConfigurationError, MachineError
from envbuild.core.progress import Reporter, SilentReporter
from envbuild.store.local import LocalStore
from envbuild.wheels.cache import reuse
from envbuild.wheels.cache.reuse import fitting_wheels
from envbuild.wheels.cache.wheelhouse import NAMED, Built, Wheelhouse, key_by_prefix
from envbuild.wheels.key import KeyParts
from envbuild.wheels.plan import plan_wheels


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store", SilentReporter())


def wanted(lock, target=GPU) -> KeyParts:
    catalog = Catalog.open(data_root())
    return plan_wheels(lock, ["causal-conv1d"], target, catalog, COMPILERS, Declared("setuptools"))[0].parts  # type: ignore[arg-type]


def test_a_wheel_is_kept_and_found(store, tmp_path):
    parts = wanted(compile_lock(tmp_path / "lock"))
    wheelhouse = Wheelhouse(store)
    assert wheelhouse.find(parts.key) is None
    assert list(wheelhouse.all()) == []
    kept = keep_wheel(store, parts, tmp_path)
    assert kept.built
    assert not keep_wheel(store, parts, tmp_path).built
    found = wheelhouse.find(parts.key)
    assert found is not None
    assert (found.record, found.wheel.name) == (kept.record, "causal_conv1d-1.7.0-cp310-cp310-linux_x86_64.whl")
    assert found.record.parts == parts
    assert [item.record.key for item in wheelhouse.all()] == [parts.key]
    assert wheelhouse.problems() == {}
    assert wheelhouse.by_prefix(parts.key[:15]).record == kept.record


def test_of_many_keys_the_nearest_few_are_named():
    known = {f"sha256:{number:064x}": f"{number}.whl" for number in range(40)} | {"sha256:" + "ab" * 32: "near.whl"}
    with pytest.raises(ConfigurationError, match="no wheel has") as refused:
        key_by_prefix("abad", known)
    assert refused.value.why.startswith("There are: abababababab (near.whl), ")
    assert refused.value.why.endswith(" and 36 more.")
    assert refused.value.why.count(".whl") == NAMED
    with pytest.raises(ConfigurationError, match="several wheels have") as refused:
        key_by_prefix("000", known)
    assert "and 35 more" in refused.value.why
    assert "near" not in refused.value.why
    with pytest.raises(ConfigurationError) as refused:
        key_by_prefix("00", {})
    assert refused.value.why == "There are: no wheels."
    with pytest.raises(ConfigurationError, match="no wheel is named"):
        key_by_prefix("", known)


def test_a_changed_wheel_is_a_problem_and_is_not_found(store, tmp_path):
    kept = keep_wheel(store, wanted(compile_lock(tmp_path / "lock")), tmp_path)
    kept.wheel.write_bytes(b"another")
    assert list(Wheelhouse(store).problems().values()) == [f"{kept.wheel.name} is not the wheel that was kept"]
    assert Wheelhouse(store).find(kept.record.key) is None
    kept.wheel.unlink()
    assert list(Wheelhouse(store).problems().values()) == [f"{kept.wheel.name} is missing"]


def swapped(store: LocalStore, folder: Path) -> list[Built]:
    """Two entries whose contents were exchanged by hand."""
    parts = wanted(compile_lock(folder / "lock"))
    kept = [keep_wheel(store, parts.model_copy(update={"sm": sm}), folder) for sm in (("80",), ("90",))]
    (one, other), aside = (item.path for item in kept), folder / "aside"
    for source, target in ((one, aside), (other, one), (aside, other)):
        source.rename(target)
    return kept


def test_swapped_entries_are_set_aside_and_made_anew(tmp_path):
    store = LocalStore(tmp_path / "store", Notes())
    one, other = swapped(store, tmp_path)
    assert list(Wheelhouse(store).all()) == []
    problems = Wheelhouse(store).problems()
    assert ["of another key" in problems[item.path.name] for item in (one, other)] == [True, True]
    assert Wheelhouse(store).find(one.record.key) is None
    assert not one.path.exists()
    assert other.path.is_dir(), "of another key, which nobody asked for"
    (line,) = store.reporter.lines  # type: ignore[attr-defined]
    assert "is set aside" in line
    assert short(other.record.key) in line
    again = keep_wheel(store, one.record.parts, tmp_path)
    assert (again.built, again.record.key) == (True, one.record.key)
    assert Wheelhouse(store).find(one.record.key) is not None


class Sources(Declared):
    """The sources of a store, which are not asked for an sdist."""

    def __init__(self, store: LocalStore, reporter: Reporter) -> None:
        super().__init__("setuptools")
        self.store, self.reporter = store, reporter


def taken(lock, store, monkeypatch, target=GPU, *, compilers=COMPILERS, notes=None, remotes=()) -> dict[str, Built]:
    def find(cuda):
        if compilers is None:
            raise MachineError("there is no CUDA toolkit")
        return compilers

    monkeypatch.setattr(reuse, "find_toolchain", find)
    catalog = Catalog.open(data_root())
    return fitting_wheels(lock, target, catalog, Sources(store, notes or SilentReporter()), remotes)  # type: ignore[arg-type]


def test_the_wheel_with_the_very_key_comes_first(store, tmp_path, monkeypatch):
    lock = compile_lock(tmp_path / "lock")
    parts = wanted(lock)
    newer = keep_wheel(store, parts.model_copy(update={"cuda_toolkit": "13.0.99"}), tmp_path)
    assert taken(lock, store, monkeypatch)["causal-conv1d"].record == newer.record
    exact = keep_wheel(store, parts, tmp_path)
    assert taken(lock, store, monkeypatch)["causal-conv1d"].record == exact.record
    assert taken(lock, store, monkeypatch, compilers=None)["causal-conv1d"].record == newer.record


@pytest.mark.parametrize(
    "change",
    [
        {"sm": ("90",)},
        {"python": "cp312"},
        {"glibc": "2.39"},
        {"sdist": "sha256:0"},
        {"cuda_toolkit": "13.1.10"},
        {"variables": {}},
        {"build_requirements": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_wheel_with_other_parts_is_not_taken(store, tmp_path, monkeypatch, change):
    lock = compile_lock(tmp_path / "lock")
    keep_wheel(store, wanted(lock).model_copy(update=change), tmp_path)
    assert taken(lock, store, monkeypatch) == {}


def test_damaged_wheel_is_left_out_with_a_note(store, tmp_path, monkeypatch):
    lock, notes = compile_lock(tmp_path / "lock"), Notes()
    keep_wheel(store, wanted(lock), tmp_path).wheel.write_bytes(b"another")
    assert taken(lock, store, monkeypatch, notes=notes) == {}
    assert "not taken" in notes.lines[0]


def test_no_plan_is_made_without_wheels_or_cuda(store, tmp_path, monkeypatch):
    lock = compile_lock(tmp_path / "lock")
    monkeypatch.setattr(reuse, "plan_wheels", lambda *given: pytest.fail("nothing is there to be planned"))
    assert taken(lock, store, monkeypatch) == {}
    keep_wheel(store, wanted(lock), tmp_path)
    assert taken(lock, store, monkeypatch, CPU) == {}
    assert taken(compile_lock(tmp_path / "cpu", cuda=None), store, monkeypatch) == {}
