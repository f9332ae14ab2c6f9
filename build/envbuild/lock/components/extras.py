"""Extras that had another name in older trees and releases of a component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from packaging.utils import canonicalize_name

from envbuild.lock.components.declarations import Declarations
from envbuild.lock.components.git_metadata import setup_names
from envbuild.lock.components.models import Chosen


def with_former_extras(chosen: Mapping[str, Chosen], declarations: Declarations) -> dict[str, Chosen]:
    """The components, with the former name of each extra that they do not have.

    uv only warns of an extra that does not exist, and nothing of what it stands for is locked then.
    """
    return {
        name: _of(component, declarations) if component.spec.former_extras else component
        for name, component in chosen.items()
    }


def _of(component: Chosen, declarations: Declarations) -> Chosen:
    # uv's maintainers keep it a warning: another release may have the extra (astral-sh/uv#2828, #10790).
    former = {
        extra: older
        for extra, older in component.spec.former_extras.items()
        if not _has_extra(component, extra, declarations)
    }
    taken = {extra: former[extra] for extra in component.spec.extras if extra in former}
    # NeMo has the extra llm since 2025-03-12: asked of its main of 03-01, it gave 163 packages without lightning.
    if not taken:
        return component
    extras = tuple(taken.get(extra, extra) for extra in component.spec.extras)
    note = ", ".join(f"extra {older}, which {extra} was before" for extra, older in taken.items())
    spec = component.spec.model_copy(update={"extras": extras})
    return replace(component, spec=spec, because=f"{component.because}; {note}")


def _has_extra(component: Chosen, extra: str, declarations: Declarations) -> bool:
    declared = declarations.of(component)
    if declared is not None:
        return canonicalize_name(extra) in map(canonicalize_name, declared.extras)
    # A setup.py that computes its extras; what only a build would tell is left to the build.
    return component.commit is None or setup_names(extra, component, declarations.context.repositories)
