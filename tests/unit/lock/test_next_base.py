"""What is printed when the next base of a stack is taken, and what is raised when none has a lock."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.catalog.site import load_site
from envbuild.core.errors import CheckRefusedError, EnvbuildError, NetworkError, ResolutionError
from envbuild.core.progress import SilentReporter
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.inputs.request import LockInputs, LockRequest
from envbuild.lock.lock import LockOptions, LockRun, lock_stack
from envbuild.lock.outcome import Failure
from envbuild.lock.search.bases import blocking, why_next
from envbuild.store.local import LocalStore

SYNTAX = "nemo.collections.llm of nemo-toolkit does not import: SyntaxError: f-string: unmatched '['"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            LockRefusedError("refused by 1 finding", findings=[CheckFinding(code="import", what=SYNTAX, fix="f")]),
            f"{SYNTAX}: no lock on base one: taking two, which stack nemo names too",
        ),
        (
            ResolutionError("cannot resolve", why="Because lib<2 is not there, we can conclude that"),
            "cannot resolve: lib<2 is not there: no lock on base one: taking two, which stack nemo names too",
        ),
        (
            CheckRefusedError("refused", codes=["cuda-mixed"]),
            "its packages are of another CUDA than base one has: taking two, which stack nemo names too",
        ),
    ],
)
def test_why_the_next_base_is_taken(error: EnvbuildError, text: str) -> None:
    one, two = (cast("Any", SimpleNamespace(base_name=name, stack_name="nemo")) for name in ("one", "two"))
    failure = Failure(inputs=cast("Any", SimpleNamespace(selection=one)), error=error)
    assert why_next(failure, two) == text


OTHER_CUDA = CheckRefusedError("as of then no torch is for CUDA 13", codes=["cuda-mixed"])
# Of the stack nemo for l4, in their order; two of CUDA 13, and two of CUDA 12.
BASES = ("ubuntu2404-cu130", "debian13-cu130", "ubuntu2204-cu126", "ubuntu2404-cu126")
Tried = Callable[[str], tuple[EnvbuildError, bool]]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Tried], tuple[list[str], EnvbuildError]]:
    """Locks stack nemo with failures by base; the bases that were tried, and what is raised."""

    def lock(failure_on: Tried) -> tuple[list[str], EnvbuildError]:
        names: list[str] = []

        def lock_on_base(_: LockRun, inputs: LockInputs, __: LockOptions) -> Failure:
            names.append(inputs.selection.base_name)
            error, settled = failure_on(inputs.selection.base_name)
            return Failure(inputs=inputs, error=error, settled=settled)

        monkeypatch.setattr(LockRun, "lock_on_base", lock_on_base)
        reporter = SilentReporter()
        store = LocalStore(tmp_path / "store", reporter)
        context = Context(store=store, site=load_site({"HOME": str(tmp_path)}), reporter=reporter)
        selection = Selection(Catalog.open(data_root()), "nemo", BASES[0], "l4")
        options = LockOptions(path=tmp_path / "lockfiles/nemo", by_base=True)
        with pytest.raises(EnvbuildError) as caught:
            lock_stack(selection, LockRequest(base_named=False), options, context)
        return names, caught.value

    return lock


def test_second_base_of_a_cuda_that_does_not_fit_is_tried_only_where_there_is_no_other_cuda(tried: Any) -> None:
    assert tried(lambda _: (OTHER_CUDA, False))[0] == [BASES[0], *BASES[2:]]


@pytest.mark.parametrize(
    ("failures", "raised"),
    [
        ((OTHER_CUDA, ResolutionError("two"), ResolutionError("three")), "two"),
        ((ResolutionError("one"), OTHER_CUDA, ResolutionError("three")), "one"),
        ((OTHER_CUDA,) * 4, OTHER_CUDA.what),
    ],
)
def test_what_blocks_the_first_base_of_the_right_cuda_is_raised(
    failures: tuple[EnvbuildError, ...], raised: str, tried: Any
) -> None:
    following = iter(failures)
    assert tried(lambda _: (next(following, failures[-1]), False))[1].what == raised


def test_what_blocks_the_base_with_the_right_python_is_raised() -> None:
    def failure(python: str, error: EnvbuildError) -> Any:
        base = SimpleNamespace(python=SimpleNamespace(version=python))
        return SimpleNamespace(inputs=SimpleNamespace(selection=SimpleNamespace(base=base)), error=error)

    other_python = failure("3.11", ResolutionError("one", why="lib==2.0 depends on Python>=3.12"))
    assert blocking([other_python, failure("3.12", CheckRefusedError("two"))]).error.what == "two"
    assert blocking([other_python]).error.what == "one"


def test_what_no_base_cures_ends_the_bases(tried: Any) -> None:
    refused = LockRefusedError("refused", findings=[CheckFinding(code="api-drift", what="w", fix="f")])
    assert tried(lambda _: (refused, True)) == ([BASES[0]], refused)
    unreachable = NetworkError("cannot list the refs of a repository").at_upstream()
    assert tried(lambda _: (unreachable, False)) == ([BASES[0]], unreachable)
