"""What is printed when the next base of a stack is taken."""

from types import SimpleNamespace

import pytest

from envbuild.core.errors import CheckRefusedError, ResolutionError
from envbuild.lock.bases import _next_base
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError

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
