"""The pins of a command line: which components they name, at which refs, and the name of a lock that they make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from packaging.utils import canonicalize_name

from envbuild.catalog.fields import NAME_PATTERN, Device
from envbuild.catalog.stack import Component, Stack
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.git.refs import GitRef
from envbuild.lock.inputs.refs import Ref, parse_ref


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


def parse_pins(stack_name: str, stack: Stack, texts: Mapping[str, str], whole: Stack | None = None) -> dict[str, Ref]:
    """The pins of a command line, by component; other names may be packages that a component from git takes.

    Args:
        whole: the stack with what it has on other bases only, to say so of a pin.

    Raises:
        UsageError: a pin names no component of the stack, and none comes from git.
        ConfigurationError: a ref has no valid form, or names a commit of a component without a repository.
    """
    every = stack.every_component()
    known = {canonicalize_name(name): name for name in every}
    pins: dict[str, Ref] = {}
    for raw, text in texts.items():
        name = known.get(canonicalize_name(raw))
        if name is None:
            elsewhere = whole.every_component() if whole is not None else {}
            if other := next((key for key in elsewhere if canonicalize_name(key) == canonicalize_name(raw)), None):
                raise _not_on_this_base(stack_name, other, elsewhere[other])
            if all(spec.git is None for spec in every.values()):
                raise unknown_pin(stack_name, raw, every)
            # What a component from git takes from git itself: known once its commit is.
            pins[canonicalize_name(raw)] = parse_ref(text)
            continue
        pins[name] = parse_ref(text)
        if isinstance(pins[name], GitRef) and every[name].git is None:
            raise ConfigurationError(
                f"{raw}={text} names a branch, tag or commit, and {name} has no repository",
                why=f"[components.{name}] of stack {stack_name} has no key git.",
                fix=f"Add git = URL there, or pin a version: --pin {name}=VERSION",
            )
    return pins


def unknown_pin(stack_name: str, name: str, known: Iterable[str]) -> UsageError:
    """That there is nothing of this name to pin."""
    return UsageError(
        f"stack {stack_name} has no component {name!r} to pin",
        why=f"Its components, and what those from git take from elsewhere: {', '.join(known)}.",
        fix="Pin one of these, or hold another package back under [requirements] of the stack.",
    )


def _not_on_this_base(stack_name: str, name: str, spec: Component) -> UsageError:
    with_or_without = "with" if spec.device is Device.CUDA else "without"
    return UsageError(
        f"stack {stack_name} has {name} on bases {with_or_without} CUDA only, so here is nothing to pin",
        why=f'[components.{name}] of the stack has device = "{spec.device.value if spec.device else ""}".',
        fix="Leave the pin out, or choose another base (`envbuild list stacks`, `envbuild list bases`).",
    )
