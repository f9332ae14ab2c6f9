"""Plans: which packages are built, and what goes into their keys."""

from __future__ import annotations

import pytest
from unit.wheels.plans import SDIST, compile_lock

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.models import Target
from envbuild.core.errors import CheckRefusedError, UsageError
from envbuild.wheels.plan import buildable, choose, cuda_of, plan_wheels
from envbuild.wheels.sources import SourceOrigin
from envbuild.wheels.toolchain.toolchain import Compilers

COMPILERS = Compilers(cuda="13.0.88", host="g++ 12.2.0")
GPU = Target.model_validate({"summary": "g", "device": "cuda", "sm": ["90", "100a"], "platform": "linux/amd64"})
CPU = Target.model_validate({"summary": "c", "device": "cpu", "platform": "linux/amd64"})


ORIGIN = SourceOrigin(package="causal-conv1d", version="1.7.0", sdist=SDIST)


class Declared:
    """What an sdist declares to be built with, and who asked."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        self.asked: list[SourceOrigin] = []

    def build_requires(self, origin: SourceOrigin) -> tuple[str, ...]:
        self.asked.append(origin)
        return self.lines


def write_recipe(folder, text: str) -> Catalog:
    file = folder / "envs/wheels/causal-conv1d.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return Catalog.open(folder)


def planned(lock, target=GPU, catalog=None, declared=("setuptools", "torch", "ninja>=1"), compilers=COMPILERS):
    sources = Declared(*declared)
    catalog = catalog or Catalog.open(data_root())
    return plan_wheels(lock, ["causal-conv1d"], target, catalog, compilers, sources)[0], sources


def test_prebuilt_package_is_not_built(tmp_path):
    lock = compile_lock(tmp_path)
    assert buildable(lock) == {"causal-conv1d": ORIGIN}
    assert choose(lock, []) == ("causal-conv1d",)
    assert choose(lock, ["Causal_Conv1d", "causal-conv1d"]) == ("causal-conv1d",)
    with pytest.raises(UsageError, match="prebuilt is not built") as refused:
        choose(lock, ["prebuilt"])
    assert "causal-conv1d" in refused.value.why


def test_the_parts_come_from_lock_target_recipe_and_compilers(tmp_path):
    plan, sources = planned(compile_lock(tmp_path))
    parts = plan.parts
    assert sources.asked == [plan.origin] == [ORIGIN]
    assert (parts.sdist, parts.python, parts.glibc, parts.platform) == (SDIST, "cp310", "2.35", "linux/amd64")
    assert (parts.sm, parts.ptx) == (("90", "100a"), ())
    assert (parts.cuda_toolkit, parts.host_compiler) == ("13.0.88", "g++ 12.2.0")
    assert parts.build_requirements == {"ninja": "1.13.0", "setuptools": "80.1"}
    assert parts.header_packages == {"nvidia-cudnn-cu13": "9.19.0.56"}
    assert parts.variables == {"CAUSAL_CONV1D_FORCE_BUILD": "TRUE"}


def test_recipes_are_filled_in(tmp_path):
    catalog = write_recipe(
        tmp_path / "own",
        'summary = "s"\nheaders = ["nvidia/cu{cuda_major}/include"]\n'
        '[variables.A]\nvalue = "{sm}"\nreason = "r"\n[variables.B]\nvalue = "{sm_dotted}"\nreason = "r"\n',
    )
    plan, _ = planned(compile_lock(tmp_path / "lock"), catalog=catalog)
    assert plan.parts.variables == {"A": "90;100a", "B": "9.0;10.0a"}
    assert plan.parts.headers == ("nvidia/cu13/include",)


def test_a_recipe_that_needs_what_is_not_locked_is_refused(tmp_path):
    catalog = write_recipe(tmp_path / "own", 'summary = "s"\nbuild_requirements = ["pybind11"]\n')
    with pytest.raises(CheckRefusedError, match="cannot be built") as refused:
        planned(compile_lock(tmp_path / "lock"), catalog=catalog)
    assert "needs pybind11" in refused.value.why
    assert "[requirements]" in refused.value.fix


@pytest.mark.parametrize(("cuda", "target", "message"), [(None, GPU, "The base small"), ("13.0", CPU, "The target")])
def test_without_cuda_nothing_is_compiled(tmp_path, cuda, target, message):
    with pytest.raises(CheckRefusedError, match="cannot be compiled") as refused:
        cuda_of(compile_lock(tmp_path, cuda=cuda), target)
    assert refused.value.why.startswith(message)
