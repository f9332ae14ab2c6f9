"""The places where a lock is verified: its base's own root file system, another base's, this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from envbuild.catalog.base import Base, Mmdebstrap
from envbuild.catalog.catalog import Catalog, Selection, definition_digest
from envbuild.catalog.context import Context
from envbuild.core.digests import Json
from envbuild.core.errors import EnvbuildError, MachineError
from envbuild.core.files import machine_errors
from envbuild.image.base import StoredBase, apt, check_tools, find_base, make_base
from envbuild.image.base.base import base_image
from envbuild.image.layers.environment import PYTHON, EnvironmentInputs, open_maker
from envbuild.image.layers.groups import LayerPlan
from envbuild.image.layers.sandbox import INSIDE_PROBE, VENV
from envbuild.lock.record.content import locked_content
from envbuild.sync.driver_start import DRIVER
from envbuild.sync.imports import ImportProbe, check_environment
from envbuild.sync.install import add_files
from envbuild.sync.places import Filled, Place, ThisMachine, Trial


@dataclass(frozen=True)
class RootfsPlace:
    """The root file system of a base, under bubblewrap.

    Attributes:
        own: it is the base that the lock is for.
    """

    selection: Selection
    context: Context
    own: bool = False

    @property
    def where(self) -> str:
        return f"base {self.selection.base_name}"

    @property
    def key(self) -> Json:
        # Once it is made: the base of another day is another place.
        made = _made(self.selection.base, self.context) if self.own else None
        image = [self._image(made)] if made else []
        return ["base", self.selection.base_name, definition_digest(self.selection.base), *image]

    def _image(self, base: StoredBase) -> str:
        return base_image(base.record, self.selection.base.platform).digest

    def problem(self) -> str:
        base, name = self.selection.base, self.selection.base_name
        try:
            base.refuse_unresolved(name)
            made = find_base(base, self.context.store)
            check_tools(base, name, made_anew=made is None)
            if made is None and isinstance(base.obtain, Mmdebstrap):
                apt.sources_for(base, name, self.context.site.apt_mirror)
        except EnvbuildError as error:
            first = f"{error.what}: {error.why}" if error.why else error.what
            return "\n".join(filter(None, [first, error.fix]))
        return ""

    def prepare(self) -> None:
        self.base  # noqa: B018 - made, if it is not in the store

    @cached_property
    def base(self) -> StoredBase:
        """The base; made when it is not in the store."""
        return make_base(self.selection, self.context)

    @contextlib.contextmanager
    def fill(self, trial: Trial, logs: Path) -> Iterator[Filled]:
        inputs = EnvironmentInputs(selection=self.selection, lock=trial.lock, base=self.base, wheels=trial.wheels)
        with open_maker(inputs, "verify", logs, self.context) as maker:
            with machine_errors(logs):
                logs.mkdir(parents=True, exist_ok=True)
            box, lock = maker.sandbox, maker.lock
            versions = lock.packages()
            names = [name for name in locked_content(lock, trial.phases) if name not in trial.scope.leave_out]
            packages = {name: versions[name] for name in names}
            # Where layers are put together, Assembly makes it. Here nothing is: the packages are only installed.
            box.tree.mkdir()
            maker.install(LayerPlan(name="bare", packages={}, key=""), logs)
            # Nothing of this is stored, so it needs no key, and its bytes need not be the same each time.
            maker.install(LayerPlan(name="verification", packages=packages, key=""), logs, settles_conflicts=False)
            add_files(lock, maker.site_packages)
            variables = check_environment(trial.target) | lock.lock.variables(VENV)
            # Writable: every process would compile the same modules again.
            probe = ImportProbe(
                python=PYTHON,
                program=INSIDE_PROBE,
                run=box.checker(variables, writable=True),
                logs=logs,
                run_with_stub=box.checker_with_stubs(variables, maker.staged / "driver", DRIVER, writable=True),
            )
            yield Filled(
                venv=VENV,
                where=self.where,
                site_packages=maker.site_packages,
                probe=probe,
                base_image=self._image(self.base) if self.own else "",
                base_made_at=self.base.record.made_at if self.own else "",
            )


def verification_places(selection: Selection, context: Context) -> tuple[Place, ...]:
    """The places where a lock of the selection can be verified, the best first.

    The base's own root file system; another base's with the same Python and a glibc at least as new; this machine.
    """
    places: list[Place] = [RootfsPlace(selection, context, own=True)]
    # What a base brings is in its own root file system alone.
    if not selection.base.provides:
        others = _others(selection.catalog, selection.base_name, selection.base, context)
        places += [RootfsPlace(replace(selection, base_name=name), context) for name in others]
        places.append(ThisMachine(selection.base, context))
    return tuple(places)


def _others(catalog: Catalog, name: str, base: Base, context: Context) -> list[str]:
    """Bases that run what is locked for a base: those in the store first, then those with the nearest glibc."""
    fitting = {}
    for other_name in catalog.names("bases"):
        other = catalog.base(other_name)
        if (
            other_name != name
            and other.platform == base.platform
            and other.python.version == base.python.version
            and Version(other.glibc) >= Version(base.glibc)
            and not other.provides
            and other.is_resolved
            # One for GPUs has the compilers that an import may need.
            and other.device is base.device
        ):
            fitting[other_name] = (_made(other, context) is None, Version(other.glibc), other_name)
    return sorted(fitting, key=fitting.__getitem__)


def _made(base: Base, context: Context) -> StoredBase | None:
    """The base in the store, if it is there."""
    try:
        return find_base(base, context.store)
    except MachineError:
        # Without mmdebstrap it is not known which one its version would make.
        return None
