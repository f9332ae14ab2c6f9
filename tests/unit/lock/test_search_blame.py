"""Which packages a failed attempt is about: texts of uv 0.13.8, as it printed them for real histories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envbuild.core.errors import BuildError, NetworkError, ResolutionError
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.search.blame import blame_of, summary
from envbuild.lock.search.state import Blame

DIRECT = ("nemo-toolkit", "nemo-run", "torch", "transformer-engine", "transformer-engine-torch", "nvidia-modelopt")
NO_RELEASE = """\
error: No solution found when resolving dependencies for split (markers: sys_platform == 'linux')
  cause: Because only transformer-engine<=2.6.0.post1 is available and your project depends on
         transformer-engine==2.7.*, we can conclude that your project's requirements are unsatisfiable.
"""
NO_VERSIONS = """\
error: No solution found when resolving dependencies for split (markers: sys_platform == 'linux')
  cause: Because there are no versions of nemo-run and your project depends on nemo-run, we can conclude that your
         project's requirements are unsatisfiable.
         And because your project requires envbuild-nemo[compile], we can conclude that your project's requirements are
         unsatisfiable.
"""
GAP = """\
error: No solution found when resolving dependencies
  cause: Because only the following versions of transformer-engine are available:
             transformer-engine<1.14.dev0
             transformer-engine>1.15.dev0
         and your project depends on transformer-engine==1.14.*, we can conclude that your project's requirements are
         unsatisfiable.
"""
CONTRADICTION = """\
error: No solution found when resolving dependencies
  cause: Because torchvision==0.17.1 depends on torch==2.2.1 and torchprofile>=0.0.4 depends on torchvision>=0.4, we can
         conclude that torchprofile>=0.0.4 depends on torch==2.2.1.
         And because nvidia-modelopt[torch]>=0.27.0,<=0.31.0 depends on torchprofile>=0.0.4 and your project depends on
         torch>=2.11, we can conclude that your project's requirements are unsatisfiable.
"""
NOT_BUILT = """\
error: Failed to build `flash-attn==2.4.2`
  cause: The build backend returned an error
  cause: Call to `setuptools.build_meta:__legacy__.get_requires_for_build_wheel` failed (exit status: 1)

         [stderr]
         ModuleNotFoundError: No module named 'torch'

hint: `flash-attn` (v2.4.2) was included because `envbuild-x` (v0) depends on `nemo-run` (v0.3) which depends on
`transformer-engine-torch>=1.9.dev0, <1.10.dev0` (v1.9.0) which depends on `flash-attn>=2.0.6, <=2.4.2`

hint: This error likely indicates that `flash-attn@2.4.2` depends on `torch`, but doesn't declare it.
"""


@pytest.mark.parametrize(
    ("text", "packages"),
    [
        (NO_RELEASE, ("transformer-engine",)),
        (NO_VERSIONS, ("nemo-run",)),
        (GAP, ("transformer-engine",)),
        (CONTRADICTION, ("torch", "nvidia-modelopt")),
        # Nothing that the project names: its first release may be newer than the moment.
        (
            "error: No solution found\n cause: Because there are no versions of optim and a==1 depends on optim",
            ("optim",),
        ),
        (NOT_BUILT, ("transformer-engine-torch", "nemo-run")),
        ("error: something else", ()),
    ],
)
def test_resolution_is_about_the_packages_that_the_project_names(text: str, packages: tuple[str, ...]) -> None:
    assert blame_of(ResolutionError("cannot resolve", why=text), DIRECT).packages == packages


def test_what_else_was_found_out_in_time_decides_nothing() -> None:
    plain = ResolutionError("cannot resolve", why=CONTRADICTION)
    explained = plain.with_context(why=f"{CONTRADICTION}\nOf the pins, transformer-engine=2.7 takes part.")
    explained.explanation = CONTRADICTION
    assert blame_of(explained, DIRECT).packages == blame_of(plain, DIRECT).packages


def test_refusal_is_about_the_packages_of_its_findings() -> None:
    findings = [
        CheckFinding(code="import", what="a fails on line 12", fix="x", packages=("nvidia-modelopt", "torch")),
        CheckFinding(code="import", what="b fails", fix="x", packages=("torch",), missing_module="pulp"),
    ]
    blame = blame_of(LockRefusedError("refused", findings=findings), DIRECT)
    assert (blame.packages, blame.missing) == (("nvidia-modelopt", "torch"), ("pulp",))
    moved = [CheckFinding(code="import", what="a fails on line 13", fix="x"), findings[1]]
    assert blame_of(LockRefusedError("refused", findings=moved), DIRECT).signature == blame.signature
    assert blame_of(LockRefusedError("refused", findings=findings[:1]), DIRECT).signature != blame.signature


def test_what_excludes_each_other_is_the_summary() -> None:
    """And not the first premise, of releases that nobody asks for."""
    why = (
        "error: No solution found when resolving\n  cause: Because core==0.11 has no wheels with a matching tag and "
        "core==0.17 depends on x<=5.3.0, we can conclude that\nAnd because bridge==0.7 depends on core and x>=5.8,\n"
        "we can conclude that bridge cannot be used."
    )
    assert summary(ResolutionError("x", why=why)) == "x: core declares x<=5.3.0, bridge x>=5.8"


def test_package_that_cannot_be_built_is_named() -> None:
    error = ResolutionError("cannot resolve", why=NOT_BUILT)
    assert blame_of(error, DIRECT).unbuilt == "flash-attn"
    assert summary(error) == "cannot resolve: Failed to build `flash-attn==2.4.2`"
    hint = "\nhint: `flash-attn` (v2.4.2) was included because `top` (v1) depends on `flash-attn`"
    assert summary(ResolutionError(error.what, why=error.why + hint)) == summary(error)


def test_what_blocks_is_the_first_failure_that_nothing_solves() -> None:
    def resolution(text: str) -> Blame:
        return blame_of(ResolutionError("cannot resolve", why=text), DIRECT)

    def findings(code: str, package: str) -> Blame:
        finding = CheckFinding(code=code, what=package, fix="x", packages=(package,))
        return replace(blame_of(LockRefusedError("refused", findings=[finding]), DIRECT), resolved=True)

    nothing_there, gap = resolution(NO_VERSIONS), resolution(GAP)
    drift, failing = findings("api-drift", "a"), findings("import", "a")
    assert gap.is_beyond(nothing_there)
    # A move after which it does not resolve, or resolves no more, solved nothing.
    assert not resolution(NO_RELEASE).is_beyond(gap)
    assert not resolution("error: something else").is_beyond(gap)
    assert (drift.is_beyond(gap), gap.is_beyond(drift)) == (True, False)
    assert (failing.is_beyond(drift), drift.is_beyond(failing)) == (True, False)
    unfetched = blame_of(NetworkError("uv cannot fetch from a git repository"), DIRECT)
    assert (unfetched.is_beyond(gap), unfetched.is_beyond(drift)) == (True, False)
    assert (findings("import", "b").is_beyond(failing), failing.is_beyond(failing)) == (True, False)


def test_error_may_name_its_packages_itself() -> None:
    assert blame_of(BuildError("no").about("flash-mla"), ()).packages == ("flash-mla",)


def test_summary_is_the_first_reason() -> None:
    actual = summary(ResolutionError("cannot resolve", why=NO_RELEASE))
    assert actual == (
        "cannot resolve: only transformer-engine<=2.6.0.post1 is available and your project depends on "
        "transformer-engine==2.7.*"
    )
    finding = CheckFinding(code="glibc", what="too new\nmore", fix="x")
    assert summary(LockRefusedError("refused", findings=[finding])) == "too new"
