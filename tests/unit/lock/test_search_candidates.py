"""What is tried in the place of a release that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.catalog.stack import Component
from envbuild.lock.components.models import Chosen, DecidedBy
from envbuild.lock.search.candidates import Candidates

RELEASES = ("0.0.0", "1.9.0", "1.10.0", "2.0.0")
TE = "transformer-engine"


class Index(Candidates):
    """Candidates of an index that has these releases."""

    def _asked(self, package: str, specifier: str, *, lowest: bool, dated: bool) -> dict[str, Any] | None:
        from packaging.specifiers import SpecifierSet

        found = [*SpecifierSet(f"{specifier},>=0.1".lstrip(",")).filter(RELEASES)]
        return {"version": found[0 if lowest else -1]} if found else None


@pytest.mark.parametrize(
    ("specifier", "locked", "tried"),
    [
        # What upstream pins was never released, and only a placeholder is below it.
        ("<1.9", "0.0.0", ["==1.9.*"]),
        ("<1.9", None, ["==1.9.*"]),
        ("==1.10.*", None, ["==2.0.*", "==1.9.*"]),
        ("==1.11.*", None, ["==2.0.*", "==1.10.*", "==1.9.*"]),
    ],
)
def test_the_nearest_releases(specifier: str, locked: str | None, tried: list[str]) -> None:
    item = Chosen(
        name=TE, spec=Component(), asked=specifier, origin=DecidedBy.UPSTREAM, because="", specifier=specifier
    )
    steps: Any = SimpleNamespace(
        decided=SimpleNamespace(chosen={TE: item}, git_sources=SimpleNamespace(missing=())),
        resolved=SimpleNamespace(resolution=SimpleNamespace(pins={TE: locked} if locked else {})),
    )
    context: Any = None
    moves = [*Index(steps, "it fails", context).likely(TE)]
    assert [[part.specifier for part in move] for move in moves] == [[text] for text in tried]
