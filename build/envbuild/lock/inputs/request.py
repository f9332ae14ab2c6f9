"""What decides a lock: what the command line asked for, and the digest of all that a new lock is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.catalog.stack import Stack
from envbuild.core.digests import Json, digest_of
from envbuild.core.errors import BuildError, CheckRefusedError, EnvbuildError, NetworkError, ResolutionError
from envbuild.lock.inputs.as_of import NOW
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.models import Deviation, Lock
from envbuild.lock.uv.explanation import needed_pythons

# Raised when a lock made from the same inputs would come out differently.
FORMAT = 2
# The table of companions that says which torch an NGC image has.
NGC_TABLE = "ngc-pytorch"


@dataclass(frozen=True, kw_only=True)
class LockRequest:
    """What the command line adds to the stack's file.

    Attributes:
        pins: text after ``--pin COMPONENT=``, by component.
        as_of: text after ``--as-of``; None for the stack's own.
        no_as_of: hold packages to no moment.
        torch_build: the build of torch instead of the base's.
        allow: codes of checks whose findings are let pass.
        fallback_from: the stack's default base, where nothing works: this one is taken in its place. Decides nothing.
        base_named: the base is meant, and not only the first that the stack names.
        exact: take upstream's pins at the tip of the branch or nothing.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    as_of: str | None = None
    no_as_of: bool = False
    torch_build: str | None = None
    allow: tuple[str, ...] = ()
    base_named: bool = True
    exact: bool = False
    fallback_from: str = ""


@dataclass(frozen=True, kw_only=True)
class LockInputs:
    """What one lock is made from.

    Attributes:
        previous: a lock of the same inputs, whose versions are kept where it is as of the same moment.
        stays: versions of the lock that is replaced since a branch moved: each is taken again where everything still
            accepts it, and upstream names no other.
        pins_stay: upstream's files that decide a lock are those of the replaced one: all its versions stay, as do its
            deviations.
        like: a lock whose compile phase may declare the same.
        deviations: what is taken in the place of pins that do not work.
        no_as_of: hold packages to no moment: the user says so, or the stack pins its components and the index has no
            upload times.
        undated: packages whose index states no upload times, which are not held to the moment.
        compiled: packages that a resolution took from the index, that upstream builds in the environment itself, and of
            which there is no wheel.
    """

    selection: Selection
    request: LockRequest
    digest: str
    previous: LockDirectory | None = None
    stays: Mapping[str, str] = field(default_factory=dict)
    pins_stay: bool = False
    like: LockDirectory | None = None
    deviations: tuple[Deviation, ...] = ()
    compiled: frozenset[str] = frozenset()
    undated: frozenset[str] = frozenset()
    no_as_of: bool = False

    @classmethod
    def from_request(cls, selection: Selection, request: LockRequest) -> LockInputs:
        """The inputs with their digest."""
        digest = inputs_digest(selection, request)
        return cls(selection=selection, request=request, digest=digest, no_as_of=request.no_as_of)

    def moved_on(self, existing: LockDirectory | None) -> LockInputs:
        """The inputs of the lock that replaces one which is old for its branches alone: its versions stay."""
        same = existing is not None and existing.lock.inputs.digest == self.digest
        # A lock as of a day keeps its versions in any case (search.first_attempt).
        if existing is None or not same or existing.lock.inputs.as_of_asked != NOW:
            return self
        return replace(self, stays=existing.packages())

    def with_pins_of(self, lock: Lock) -> LockInputs:
        """The inputs of a lock that differs from one in nothing but commits that change no pin."""
        return replace(self, pins_stay=True, deviations=lock.deviating)

    @property
    def title(self) -> str:
        """For messages: ``stack mcore on debian12``."""
        return f"stack {self.selection.stack_name} on {self.selection.base_name}"

    @property
    def torch_build(self) -> str:
        return self.request.torch_build or self.selection.base.torch.build


class NoReleaseError(ResolutionError):
    """The index has no release that the user pinned: no other base has it."""


def leaves_open(stack: Stack) -> bool:
    """Whether a stack leaves releases to its anchor's upstream and the index, so that what resolves need not work."""
    return stack.anchor is not None and bool(stack.undecided())


def may_deviate(selection: Selection, request: LockRequest) -> bool:
    """Whether a lock may take other releases than upstream's: the stack leaves some open, and the user allows it."""
    return leaves_open(selection.stack) and not request.exact


def is_curable(error: EnvbuildError) -> bool:
    """Whether other versions, or another base, may cure a failure.

    Others (no network, no permission, a wrong option) end a search.
    """
    if isinstance(error, NoReleaseError):
        return False
    return error.of_upstream or isinstance(error, (ResolutionError, CheckRefusedError, BuildError))


def is_of_another_cuda(error: EnvbuildError) -> bool:
    """Whether packages are of another CUDA than the base, so that another base may do."""
    return isinstance(error, CheckRefusedError) and error.codes == {"cuda-mixed"}


def has_python_for(base: Base, error: EnvbuildError) -> bool:
    """Whether a failure is that packages need another Python, and a base has such a one."""
    needed = needed_pythons(error.why) if isinstance(error, ResolutionError) else ()
    # A base names no patch release: its newest is taken.
    return any(SpecifierSet(wanted).contains(f"{base.python.version}.99") for wanted in needed)


def may_help(base: Base, selection: Selection, request: LockRequest, error: EnvbuildError) -> bool:
    """Whether another base of the stack may cure a failure on the selection's: releases are open there, or it differs.

    It differs by the CUDA, or by the Python, that packages need.
    """
    # A repository is there or not, whatever the base.
    if isinstance(error, NetworkError):
        return False
    may = may_deviate(selection, request)
    # Other releases are no cure where it is the pinned one.
    if isinstance(error, ResolutionError) and needed_pythons(error.why) and (error.nearest_pins or not may):
        return has_python_for(base, error)
    return may or is_of_another_cuda(error)


def request_of(lock: Lock) -> LockRequest:
    """What the command line said when the lock was made."""
    inputs = lock.inputs
    return LockRequest(
        pins=inputs.pins,
        as_of=inputs.as_of_request,
        no_as_of=inputs.no_as_of,
        torch_build=inputs.torch_build_request,
        allow=inputs.allow,
        exact=inputs.exact,
    )


def request_options(request: LockRequest) -> list[str]:
    """The options of the command line that ask for the same."""
    options = [word for name, text in request.pins.items() for word in ("--pin", f"{name}={text}")]
    options += ["--as-of", request.as_of] if request.as_of else []
    options += ["--no-as-of"] if request.no_as_of else []
    options += ["--torch-build", request.torch_build] if request.torch_build else []
    options += [word for code in request.allow for word in ("--allow", code)]
    return [*options, *(["--exact"] if request.exact else [])]


def inputs_digest(selection: Selection, request: LockRequest) -> str:
    """The digest of everything that decides a lock, except the moment and where branches stand."""
    value: dict[str, Json] = {
        "format": FORMAT,
        "stack": definition_digest(selection.stack),
        "base": definition_digest(selection.base),
        "torch_build": request.torch_build or selection.base.torch.build,
        "pins": dict(sorted(request.pins.items())),
        "as_of": request.as_of or "",
        "allow": [*sorted(set(request.allow))],
        # These keys are left out where they decide nothing: locks that were made before there were such keys keep their
        # digest, and are not made again.
        **({"exact": True} if request.exact else {}),
        **({"no_as_of": True} if request.no_as_of else {}),
        **_companions(selection),
        **({"declared_ranges": True} if may_hold(selection.stack, request.pins) else {}),
        # What trains wrongly is reported of a lock whenever it is used, and decides none of its versions.
        "conflicts": {
            name: definition_digest(conflict)
            for name, conflict in selection.catalog.conflicts.items()
            if not conflict.cases
        },
        # What the checks hold a lock to; a target's words are no part of it.
        "targets": {
            entry.target: [list(target.sm), target.driver or ""]
            for entry in selection.stack.builds
            for target in [selection.catalog.target(entry.target)]
        },
    }
    return digest_of(value)


def _companions(selection: Selection) -> dict[str, Json]:
    """The tables of companions that can decide something of the stack; nothing when none can."""
    stack = selection.stack
    leads = [name for name in (stack.anchor, stack.takeover.lead if stack.takeover else None) if name is not None]
    # Which torch the image has that upstream's tests run in.
    leads += [NGC_TABLE] if leads else []
    tables = {name: selection.catalog.companions(name) for name in leads}
    by_name: dict[str, Json] = {
        name: definition_digest(table)
        for name, table in tables.items()
        if table is not None and table.names() & stack.undecided()
    }
    return {"companions": by_name} if by_name else {}


def may_hold(stack: Stack, pins: Mapping[str, str]) -> bool:
    """Whether declared ranges can decide something of a stack's lock with these pins."""
    every = stack.every_component()
    used = {name for spec in every.values() for name in spec.uses}
    pinned = {canonicalize_name(name) for name in pins}
    taking_part = {name for name, spec in every.items() if spec.uses or name in used}
    return bool(used & stack.undecided() or taking_part & pinned)


def is_older(lock: Lock, selection: Selection) -> bool:
    """Whether the stack, the base, the conflicts or the companions are others than when the lock was made."""
    return lock.inputs.digest != inputs_digest(selection, request_of(lock))
