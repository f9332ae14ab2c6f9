"""Which pins make another lock than the stack's own, and under which name it is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

from packaging.utils import canonicalize_name

from envbuild.catalog.models import NAME_PATTERN, Stack
from envbuild.core.errors import UsageError


def foreign_pins(stack: Stack, pins: Mapping[str, str]) -> dict[str, str]:
    """The pins that ask for something else than the stack's file, under the stack's names of the components.

    Beside such a pin, one that says what the file says counts too: what the pinned components declare would win over
    the file. Not the anchor's, since a pin of it sets another date.
    """
    every = stack.every_component()
    names = {canonicalize_name(name): name for name in every}
    own = {name: spec.ref or spec.version.removeprefix("==") for name, spec in every.items()}
    named = {names.get(canonicalize_name(name), name): text for name, text in pins.items()}
    foreign = {name for name, text in named.items() if own.get(name) != text}
    return {name: text for name, text in named.items() if name in foreign or (foreign and name != stack.anchor)}


def variant_name(stack_name: str, stack: Stack, pins: Mapping[str, str], name: str | None) -> str:
    """The name under which a lock is kept: pins never overwrite the lock of the stack itself.

    A pin of the anchor alone names its variant (``nemo-v2.3.0``).

    Args:
        pins: see :func:`foreign_pins`.

    Raises:
        UsageError: other pins without ``--name``, or the name has characters that a folder of a lock may not have.
    """
    if name is not None:
        return checked_name(name)
    if not pins:
        return stack_name
    if list(pins) == [stack.anchor]:
        text = re.sub(r"[^a-z0-9._-]+", "-", next(iter(pins.values())).lower()).strip("-")
        return f"{stack_name}-{text}"
    raise UsageError(
        "pins need a name for the lock that they make",
        why=f"The lock of stack {stack_name} itself is not overwritten by {', '.join(pins)}.",
        fix="Add --name NAME (the lock goes to lockfiles/NAME/BASE) or --out DIR.",
    )


def checked_name(name: str) -> str:
    """The name of a lock, which is that of its folder.

    Raises:
        UsageError: it has characters that the folder may not have.
    """
    if re.match(NAME_PATTERN, name) is None:
        raise UsageError(
            f"--name {name!r} is not a valid name of a lock",
            why=f"It must match {NAME_PATTERN}.",
            fix="Use small letters, digits, dots, dashes and underscores.",
        )
    return name
