"""Which training code a lock is for, and what takes over where NeMo's tree no longer has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envbuild.catalog.stack import Driver, Stack
from envbuild.core.errors import UsageError
from envbuild.lock.components.models import Chosen, Lead
from envbuild.lock.components.releases import Releases, release_has_folder
from envbuild.lock.components.select import lead, own_choice
from envbuild.lock.components.upstream import LLM_COLLECTION, has_folder
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs.as_of import Bound
from envbuild.lock.inputs.refs import Ref

NEMO_TOOLKIT = "nemo-toolkit"
STACKS_FILE = "the stack's file"


@dataclass(frozen=True, kw_only=True)
class EffectiveStack:
    """A stack as it holds for the anchor that was chosen.

    Attributes:
        stack: with the components and the driver of its takeover, where that holds.
        leads: whose upstreams decide the companions; the first one wins.
        because: why the driver is what it is.
    """

    stack: Stack
    leads: tuple[Lead, ...]
    because: str

    @property
    def driver(self) -> Driver:
        return self.stack.driver


def effective_stack(
    stack: Stack, anchor: Chosen | None, pins: Mapping[str, Ref], as_of: Bound, releases: Releases
) -> EffectiveStack:
    """Decide whether the stack's takeover holds, and read what belongs to the components that lead.

    Args:
        releases: what is known of a lead that is a release.

    Raises:
        UsageError: a component that only the takeover brings is pinned, and it does not hold.
    """
    if anchor is None:
        return EffectiveStack(stack=stack, leads=(), because=STACKS_FILE)
    repositories = releases.context.repositories
    own = lead(anchor, releases)
    takeover = stack.takeover
    if takeover is None:
        return EffectiveStack(stack=stack, leads=(own,), because=STACKS_FILE)
    if anchor.commit is not None and anchor.git is not None:
        has_code = has_folder(repositories.at(anchor.git), anchor.commit, takeover.without)
    else:
        has_code = releases.has_folder(anchor, takeover.without)
    if has_code:
        if unused := [name for name in pins if name not in stack.components]:
            raise UsageError(
                f"{', '.join(unused)} is pinned, and is not in the stack with {anchor.at()}",
                why=f"The stack has it only where the anchor has no {takeover.without}, and this one has.",
                fix="Leave the pin out, or choose another anchor.",
            )
        return EffectiveStack(stack=stack, leads=(own,), because=f"{anchor.at()} has {takeover.without}")
    taken = stack.taken_over()
    spec = taken.components[takeover.lead]
    choice = own_choice(takeover.lead, spec, pins.get(takeover.lead), repositories, as_of)
    other = lead(choice, releases)
    because = f"{anchor.at()} has no {takeover.without}: {takeover.reason}"
    return EffectiveStack(stack=taken, leads=(other, own), because=because)


def commit_without_llm(chosen: Mapping[str, Chosen], driver: Driver, repositories: Repositories) -> str:
    """What driver ``nemo`` misses in a nemo-toolkit from git; empty: nothing, or it is a release."""
    item = chosen.get(NEMO_TOOLKIT)
    if driver is not Driver.NEMO or item is None or item.commit is None or item.git is None:
        return ""
    if has_folder(repositories.at(item.git), item.commit, LLM_COLLECTION):
        return ""
    return f"{item.at()} has no {LLM_COLLECTION}"


def release_without_llm(packages: Mapping[str, Mapping[str, Any]], driver: Driver, context: LockContext) -> str:
    """What driver ``nemo`` misses in the release of nemo-toolkit that was locked; empty: nothing, or it is from git.

    Args:
        packages: the ``[[package]]`` tables of uv.lock by name.
    """
    if driver is not Driver.NEMO:
        return ""
    package = packages.get(NEMO_TOOLKIT)
    if package is None:
        return f"there is no {NEMO_TOOLKIT}"
    if "git" in package["source"] or release_has_folder(package, LLM_COLLECTION, context):
        return ""
    return f"{NEMO_TOOLKIT} {package['version']} has no {LLM_COLLECTION}"
