"""What is printed when the next base of a stack is taken, and what is raised when none has a lock."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envbuild.core.errors import CheckRefusedError, EnvbuildError, ResolutionError
from envbuild.lock import bases as module
from envbuild.lock.bases import _next_base, lock_on_fitting_base
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.inputs import request
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.lock import LockOptions

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
def test_why_the_next_base_is_taken(error, text):
    one, two = (SimpleNamespace(base_name=name, stack_name="nemo") for name in ("one", "two"))
    assert _next_base(one, two, error) == text


OTHER_CUDA = CheckRefusedError("as of then no torch is for CUDA 13", codes=["cuda-mixed"])


@dataclass(frozen=True)
class Item:
    base_name: str
    stack_name: str = "nemo"
    cuda: str = "13"

    @property
    def base(self) -> Any:
        return SimpleNamespace(cuda_major=self.cuda)


def refusal(
    items: list[Item],
    tried: Callable[[Item, object, LockOptions, object], EnvbuildError],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
) -> EnvbuildError:
    """What a lock of a stack on these bases ends with, each of which fails as ``tried`` says."""
    monkeypatch.setattr(module, "_tried", tried)
    monkeypatch.setattr(module, "_other_bases", lambda _: items[1:])
    for place in (module, request):
        monkeypatch.setattr(place, "may_deviate", lambda *_: True)
    monkeypatch.setattr(module, "lock_on_base", lambda *_: None)
    context = cast("Any", SimpleNamespace(reporter=SimpleNamespace(note=lambda _: None)))
    options = LockOptions(path=folder)
    with pytest.raises(EnvbuildError) as caught:
        lock_on_fitting_base(cast("Any", items[0]), LockRequest(base_named=False), lambda _: options, context)
    return caught.value


def tried_in_turn(items: list[Item], monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """The bases that are tried where the packages are of another CUDA than each."""
    names: list[str] = []

    def refused(item: Item, *_: object) -> EnvbuildError:
        names.append(item.base_name)
        return OTHER_CUDA

    refusal(items, refused, monkeypatch, folder)
    return names


def test_second_base_of_a_cuda_that_does_not_fit_is_tried_only_where_there_is_no_other_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    three = [Item("a"), Item("b"), Item("c", cuda="12")]
    assert tried_in_turn(three, monkeypatch, tmp_path) == ["a", "c"]
    assert tried_in_turn(three[:2], monkeypatch, tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("failures", "raised"),
    [
        ((OTHER_CUDA, ResolutionError("two"), ResolutionError("three")), "two"),
        ((ResolutionError("one"), OTHER_CUDA, ResolutionError("three")), "one"),
        ((OTHER_CUDA,) * 3, OTHER_CUDA.what),
    ],
)
def test_what_blocks_the_first_base_of_the_right_cuda_is_raised(
    failures: tuple[EnvbuildError, ...], raised: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    items = [Item("a"), Item("b"), Item("c")]

    def tried(item: Item, *_: object) -> EnvbuildError:
        return failures[items.index(item)]

    assert refusal(items, tried, monkeypatch, tmp_path).what == raised


def test_what_no_base_cures_ends_the_bases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[str] = []

    def refused(item: Item, *_: object) -> EnvbuildError:
        tried.append(item.base_name)
        error = LockRefusedError("refused", findings=[CheckFinding(code="api-drift", what="w", fix="f")])
        error.settled = True
        return error

    refusal([Item("a"), Item("b"), Item("c")], refused, monkeypatch, tmp_path)
    assert tried == ["a"]
