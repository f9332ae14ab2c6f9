"""The checks before a lock is accepted: what each refuses, and what it lets pass."""

import re
from pathlib import Path

import pytest
from helpers.locks import resolved_package

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.conflict import Conflict
from envbuild.catalog.models import Target
from envbuild.core.errors import CheckRefusedError
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError, refuse
from envbuild.lock.checks.rules import CheckInput, run_checks
from envbuild.lock.components.downloads import base_tags

CATALOG = Catalog.open(Path("/nonexistent"))


def base(**changes: object) -> Base:
    return CATALOG.base("debian12").model_copy(update={"glibc": "2.35", "cuda": "13.0", **changes})


def target(*sm: str, driver: str | None = None) -> Target:
    return Target(summary="t", device="cuda" if sm else "cpu", sm=sm, driver=driver, platform="linux/amd64")


def wheel(name: str, tags: str, version: str = "1.0", **more: object) -> dict:
    return {"name": name, "version": version, "wheels": [{"url": f"https://x/{name}-{version}-{tags}.whl"}], **more}


def package(name: str, version: str = "1.0") -> dict:
    return wheel(name.replace("-", "_"), "py3-none-any", version) | {"name": name}


def codes(*packages: dict, on: Base | None = None, **changes: object) -> list[str]:
    return [finding.code for finding in findings(*packages, on=on, **changes)]


def findings(*packages: dict, on: Base | None = None, **changes: object) -> tuple[CheckFinding, ...]:
    fields: dict = {"targets": {}, "conflicts": {}, "torch_build": "index"}
    return run_checks(
        CheckInput(packages=tuple(map(resolved_package, packages)), base=on or base(), **(fields | changes))
    )


def test_nothing_to_find():
    assert (
        codes(package("a"), package("core-cu13"), package("cuda-toolkit", "13.0.2"), targets={"t": target("90")}) == []
    )


@pytest.mark.parametrize(
    ("tags", "refused"),
    [
        ("cp311-cp311-manylinux_2_39_x86_64", True),
        ("cp311-cp311-manylinux_2_36_x86_64", True),
        ("cp311-cp311-manylinux_2_35_x86_64", False),
        ("cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64", False),
        ("cp38-abi3-manylinux2014_x86_64", False),
        ("cp312-cp312-manylinux_2_28_x86_64", True),
        ("cp311-cp311-manylinux_2_28_aarch64", True),
        ("cp311-cp311-win_amd64", True),
        ("py3-none-any", False),
        ("py3-none-manylinux_2_28_x86_64", False),
        ("cp311-cp311-linux_x86_64", False),
    ],
)
def test_glibc_python_and_platform(tags, refused):
    assert codes(wheel("native", tags)) == (["glibc"] if refused else [])
    assert codes(wheel("native", tags, sdist={"url": "https://x/native.tar.gz"})) == []


def test_glibc_names_what_is_needed():
    (finding,) = findings(wheel("native", "cp311-cp311-manylinux_2_39_x86_64"))
    assert (
        "native 1.0 cannot be installed on the base (glibc 2.35, Python 3.11): its wheels need glibc 2.39"
        in finding.what
    )
    (finding,) = findings(wheel("native", "cp311-cp311-win_amd64"))
    assert "no wheel is for its Python and platform" in finding.what


@pytest.mark.parametrize("key", ["filename", "path"])
def test_wheels_of_folders_count_too(key):
    native = {"name": "torch", "version": "2+cpu", "wheels": [{key: "torch-2+cpu-cp311-cp311-linux_x86_64.whl"}]}
    quoted = {
        "name": "torch",
        "version": "2+cpu",
        "wheels": [{"url": "https://x/torch-2%2Bcpu-cp311-cp311-linux_x86_64.whl"}],
    }
    assert codes(native) == codes(quoted) == []


def test_tags_of_another_machine():
    tags = {str(tag) for tag in base_tags(base(platform="linux/arm64"))}
    assert "cp311-cp311-manylinux_2_35_aarch64" in tags
    assert not any("x86_64" in tag or "2_36" in tag for tag in tags)


@pytest.mark.parametrize(
    ("names", "cuda", "build", "refused"),
    [
        (("core-cu12", "core-cu13"), "13.0", "index", True),
        (("core-cu12", "core-cu13"), None, "index", True),
        (("core-cu12",), "13.0", "index", True),
        (("core-cu13",), "13.0", "index", False),
        (("core-cu13",), None, "index", False),
        (("core-cu13",), None, "cpu", True),
        (("core",), None, "cpu", False),
        (("core-cu12", "cuda-toolkit"), None, "index", True),
        (("core-cu13", "cuda-toolkit"), "13.0", "index", False),
        (("core-cu126",), "13.0", "index", True),
        (("cupy-cuda12x",), "13.0", "index", True),
        (("tensorrt-cu12-libs",), "13.0", "index", True),
        (("nvidia-cublas", "nvidia-cuda-runtime"), "13.0", "index", False),
        (("nvidia-cublas",), "12.8", "index", True),
        (("core-cuts", "accuracy-cu"), "13.0", "index", False),
        (("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13", "core-cu13"), "13.0", "index", False),
        (("nvidia-cutlass-dsl-libs-cu12",), "13.0", "index", False),
        (("nvidia-cutlass-dsl-libs-cu12", "core-cu12"), "13.0", "index", True),
        (("other-cutlass-dsl-libs-cu12",), "13.0", "index", True),
    ],
)
def test_one_cuda(names, cuda, build, refused):
    actual = codes(*(package(name, "13.0.2") for name in names), on=base(cuda=cuda), torch_build=build)
    assert actual == (["cuda-mixed"] if refused else [])


def test_a_mix_is_about_what_needs_it_also_for_an_extra():
    needing = {**package("numba-cuda", "1"), "optional-dependencies": {"cu13": [{"name": "nvidia-cuda-runtime"}]}}
    wrong = package("nvidia-cuda-runtime", "13.1")
    (finding,) = findings(needing, wrong, package("core-cu12"), on=base(cuda="12.6"))
    assert finding.packages == ("numba-cuda",)


def test_a_mix_names_the_stacks_bases_for_that_cuda():
    bases = {"old": base(cuda="12.6"), "new": base(cuda="13.0"), "none": base(cuda=None)}
    (finding,) = findings(package("core-cu12"), on=base(cuda="13.0"), bases=bases)
    assert "(the stack names old)" in finding.fix


@pytest.mark.parametrize(
    ("cuda", "sm", "refused"),
    [
        ("12.6", "100", True),
        ("12.8", "100a", False),
        ("12.8", "103", True),
        ("12.6", "90", False),
        ("11.7", "90a", True),
        ("12.6", "77", True),
        ("12.6", "70", False),
        ("13.0", "70", True),
        ("13.0", "75", False),
        ("12.8", "101", False),
        ("13.0", "101", True),
        ("13.0", "110", False),
        ("12.9", "110", True),
        ("12.6", "121", True),
    ],
)
def test_sm_floor(cuda, sm, refused):
    assert codes(targets={"t": target(sm)}, on=base(cuda=cuda)) == (["sm-floor"] if refused else [])


def test_sm_floor_counts_the_cuda_that_torch_brings():
    for brought in (package("cuda-toolkit", "12.6.3"), package("nvidia-cuda-runtime-cu12", "12.6.77")):
        (finding,) = findings(brought, targets={"t": target("100")}, on=base(cuda="12.8"))
        assert (finding.code, "12.8 or newer" in finding.what) == ("sm-floor", True)


@pytest.mark.parametrize(
    ("driver", "refused"), [("550.54.15", True), ("579.99", True), ("580", False), ("580.65.06", False), (None, False)]
)
def test_driver(driver, refused):
    assert codes(targets={"t": target("90", driver=driver)}) == (["driver"] if refused else [])


def test_a_cpu_lock_has_no_floor():
    assert codes(targets={"t": target("100", driver="1")}, on=base(cuda=None)) == []


CONFLICT = Conflict(summary="hangs", packages={"a-b": "<2", "torch": ">=2.7"}, evidence="seen", fix="Take another.")


@pytest.mark.parametrize(
    ("packages", "provides", "refused"),
    [
        ((package("a-b"), package("torch", "2.7.0+cpu")), {}, True),
        ((package("a-b", "2.0"), package("torch", "2.7.0")), {}, False),
        ((package("a-b"),), {}, False),
        ((package("a-b"),), {"torch": "2.8.0a0"}, True),
        ((package("a-b", "2.0rc1"), package("torch", "2.8")), {}, False),
    ],
)
def test_known_conflicts(packages, provides, refused):
    actual = findings(*packages, on=base(provides=provides), conflicts={"a-b-torch": CONFLICT})
    assert [finding.code for finding in actual] == (["a-b-torch"] if refused else [])
    assert [finding.fix for finding in actual] == (["Take another."] if refused else [])


BASELINES = Catalog.open(Path("/nonexistent")).matrix("certify-quick")


@pytest.mark.parametrize(
    ("cases", "matrix", "version", "refused"),
    [
        ([{"kind": "gpt"}], BASELINES, "2.7", True),
        ([{"loss_mask": "none"}, {"loss_mask": "uneven"}], BASELINES, "2.7", True),
        ([{"loss_mask": "none"}], BASELINES, "2.7", False),
        ([{"tensor": 2}], BASELINES, "2.7", False),
        ([{"kind": "gpt"}], BASELINES, "2.6", False),
        ([{"kind": "gpt"}], None, "2.7", False),
    ],
)
def test_lock_of_which_every_baseline_trains_wrongly_is_refused(cases, matrix, version, refused):
    entry = {"summary": "s", "packages": {"torch": ">=2.7"}, "evidence": "seen", "fix": "Take another.", "cases": cases}
    wrong = Conflict.model_validate({**entry, "shown_by": {"matrix": "m", "case": "c"}})
    actual = findings(package("torch", version), conflicts={"x": wrong}, matrix=matrix)
    what = "torch 2.7 trains every baseline of the stack's matrix wrongly: s (evidence: seen)"
    assert [(finding.code, finding.what, finding.packages) for finding in actual] == (
        [("x", what, ("torch",))] if refused else []
    )


ONE, TWO = CheckFinding(code="one", what="first", fix="a"), CheckFinding(code="two", what="second", fix="b")


def test_findings_refuse_unless_allowed():
    with pytest.raises(CheckRefusedError, match=re.escape("the lock of X is refused by 1 finding")) as caught:
        refuse([ONE, TWO], ["one"], "X")
    assert f"[{TWO.id}] second" in caught.value.why
    assert "first" not in caught.value.why
    assert caught.value.fix.endswith(f"--allow {TWO.id}")
    assert refuse([ONE, TWO], ["two", "one", "unused"], "X") == (ONE, TWO)
    assert refuse([], [], "X") == ()


CUDA12 = ("nvidia-cuda-runtime-cu12", "12.6.77"), ("nvidia-nccl-cu12", "2.26.2")
CUDA13 = ("nvidia-cuda-runtime", "13.0.96"), ("nvidia-nccl-cu13", "2.28.9"), ("nvidia-cublas", "13.1.0")


@pytest.mark.parametrize(
    ("packages", "value", "refused"),
    [
        (CUDA12, "{site_packages}/nvidia/cuda_runtime/include", False),
        (CUDA12, "{site_packages}/nvidia/cu13/include", True),
        (CUDA13, "{site_packages}/nvidia/cu13/include", False),
        (CUDA13, "{site_packages}/nvidia/cu13", False),
        (CUDA13, "{site_packages}/nvidia/cuda_runtime/include", True),
        (CUDA13[1:], "{site_packages}/nvidia/cu13/include", True),  # cublas has no headers of the runtime
        (CUDA13[1:], "{site_packages}/nvidia/cu13/lib", False),
        (CUDA13, "{site_packages}/nvidia/nccl/lib:{site_packages}/nvidia/cu13/lib", False),
        (CUDA13, "{site_packages}/nvidia/nccl/lib:{site_packages}/nvidia/cu12/lib", True),
        (CUDA13, "{site_packages}/nvidia/modelopt", False),  # of which nothing is known here
        (CUDA13, "{venv}/lib:/opt/x", False),
    ],
)
def test_a_variable_names_folders_that_the_packages_bring(packages, value, refused):
    on = base(cuda="12.6" if packages is CUDA12 else "13.0")
    actual = codes(*(package(*entry) for entry in packages), on=on, variables={"V": value})
    assert actual == (["variable-folder"] if refused else [])


def test_one_finding_of_a_check_is_allowed_by_its_id():
    first, second = (CheckFinding(code="one", what="x", fix="y", subject=name) for name in "ab")
    assert first.id != second.id
    assert re.fullmatch("one:[0-9a-f]{8}", first.id)
    with pytest.raises(LockRefusedError) as caught:
        refuse([first, second], [first.id], "X")
    assert caught.value.findings == (second,)
    assert refuse([first, second], [first.id, second.id], "X") == (first, second)
    # Lines and versions are no part of it; by default packages are.
    assert CheckFinding(code="one", what="z", fix="y", subject="a").id == first.id
    assert (
        CheckFinding(code="one", what="z", fix="y", packages=("c",)).id
        != CheckFinding(code="one", what="z", fix="y").id
    )
    assert CheckFinding(code="one", what="z", fix="y", packages=("b", "a")).id == (
        CheckFinding(code="one", what="x", fix="y", packages=("a", "b")).id
    )


def test_a_long_refusal_names_codes():
    many = [CheckFinding(code="one", what="x", fix="y", subject=str(number)) for number in range(9)]
    with pytest.raises(CheckRefusedError) as caught:
        refuse(many, [], "X")
    assert caught.value.fix.endswith(": --allow one")


def test_warnings_refuse_nothing_and_are_not_among_what_is_allowed():
    assert refuse([CheckFinding(code="one", what="x", fix="y", warning=True)], ["one"], "X") == ()


@pytest.mark.parametrize(
    ("actual", "packages"),
    [
        (findings(wheel("native", "cp311-cp311-win_amd64")), ("native",)),
        (
            findings(
                package("torch") | {"dependencies": [{"name": "a-cu12"}, {"name": "b-cu12"}]},
                package("engine") | {"dependencies": [{"name": "a-cu12"}, {"name": "c-cu13"}]},
                *map(package, ("a-cu12", "b-cu12", "c-cu13")),
            ),
            ("torch", "engine"),
        ),
        (findings(package("asked-cu12")), ("asked-cu12",)),
        (findings(package("cuda-toolkit", "13.0"), targets={"t": target("70")}), ("torch",)),
        (findings(package("cuda-toolkit", "13.0"), targets={"t": target("90", driver="1")}), ("torch",)),
        (findings(package("a-b"), package("torch", "2.7"), conflicts={"a-b-torch": CONFLICT}), ("a-b", "torch")),
        (
            findings(
                package("twice", "1"),
                package("twice", "2"),
                package("user") | {"dependencies": [{"name": "twice", "version": "2"}]},
            ),
            ("twice", "user"),
        ),
        (findings(driver_problem="it is 3.0"), ("nemo-toolkit",)),
        # Another version of a package cures neither.
        (findings(ignored_settings="dropped"), ()),
        (findings(asked={"x": "<1"}, on=base(provides={"x": "2"})), ()),
    ],
)
def test_findings_name_the_packages_that_may_be_moved(actual, packages):
    (finding,) = actual
    assert finding.packages == packages
