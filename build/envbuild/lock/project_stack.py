"""The stack of a uv project: which training code, targets and bases its uv.lock is for."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.context import Context
from envbuild.catalog.fields import Device
from envbuild.catalog.models import Target
from envbuild.catalog.stack import Builds, Driver, UvProject
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.text import shown
from envbuild.lock.checks.rules import sm_problem
from envbuild.lock.context import LockContext, run_context, work_folder
from envbuild.lock.inputs.pins import checked_name
from envbuild.lock.lockfile import UV_LOCK
from envbuild.lock.uv.cuda_packages import cuda_packages
from envbuild.lock.uv_lock import UvLock
from envbuild.lock.uv_project.exported import project_packages, python_is_for, read_uv_lock
from envbuild.lock.uv_project.tree import ProjectTree, project_tree

# user@host:path
_SHORT_ADDRESS = re.compile(r"^[\w.-]+@[\w.-]+:")
# The first that is installed.
_DRIVERS = {"megatron-bridge": Driver.BRIDGE, "nemo-toolkit": Driver.NEMO, "megatron-core": Driver.MCORE}


def stack_of_project(
    tree: ProjectTree, catalog: Catalog, context: LockContext, *, base: str | None, target: str | None
) -> str:
    """The text of the file of a stack whose packages a project's uv.lock decides.

    Args:
        base: the only one; None: those of the catalog that fit.
        target: the same.

    Raises:
        ConfigurationError: no base fits.
    """
    import tomlkit  # slow, and most commands only read

    uv_lock = read_uv_lock(tree)
    bases = {name: catalog.base(name) for name in ([base] if base else catalog.names("bases"))}
    fitting = {name: known for name, known in bases.items() if python_is_for(uv_lock, known)}
    if not fitting:
        raise _no_base(tree, uv_lock, bases)
    packages = project_packages(tree, next(iter(fitting.values())), context).uv_lock
    targets = {name: catalog.target(name) for name in ([target] if target else catalog.names("targets"))}
    builds = [*_builds(packages, targets, fitting)]
    if not builds:
        raise _no_base(tree, uv_lock, bases)
    installed = {package.name for package in packages.packages}
    driver = next((driver for name, driver in _DRIVERS.items() if name in installed), Driver.NONE)
    document = tomlkit.document()
    document["summary"] = f"the uv project {tree.name}, as its uv.lock has it"
    document["driver"] = driver.value
    document["project"] = tree.definition.model_dump(mode="json", exclude_defaults=True)
    document["builds"] = [entry.model_dump(mode="json") for entry in builds]
    return tomlkit.dumps(document)


def project_of(text: str, above: Path, extras: tuple[str, ...], groups: tuple[str, ...]) -> UvProject:
    """The project that a command line names: a folder, or ``URL@REF``.

    Raises:
        UsageError: an address without a ref.
    """
    # git's own short form (user@host:path) has an @, too: the ref is after the last one, and has no slash before a :.
    if "://" in text or _SHORT_ADDRESS.match(text):
        address, _, ref = text.rpartition("@")
        if not ref or ("://" not in address and not _SHORT_ADDRESS.match(address)):
            raise UsageError(
                f"--project {text} names no branch, tag or commit",
                why="A repository has many states, and a lock is of one.",
                fix=f"Add it: --project {text}@main",
            )
        return UvProject(git=address, ref=ref, extras=extras, groups=groups)
    folder = Path(text).expanduser().absolute()
    return UvProject(path=os.path.relpath(folder, above.absolute()), extras=extras, groups=groups)


def write_stack(
    definition: UvProject, above: Path, context: Context, *, name: str | None, base: str | None, target: str | None
) -> str:
    """Write ``envs/stacks/NAME.toml`` for a project, unless it is there; returns its name.

    Raises:
        UsageError: the file is there, and is of something else.
    """
    catalog = Catalog.open(above)
    with work_folder(run_context(context), "project", "project") as work:
        tree = project_tree(definition, above, work)
        chosen = checked_name(name or tree.name)
        if chosen in catalog.names("stacks"):
            _refuse_another(catalog, chosen, definition)
            return chosen
        text = stack_of_project(tree, catalog, work, base=base, target=target)
    file = above / "envs" / "stacks" / f"{chosen}.toml"
    with machine_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    context.reporter.note(f"note: wrote {shown(file)}: --stack {chosen} names the project from now on")
    return chosen


def _refuse_another(catalog: Catalog, name: str, definition: UvProject) -> None:
    known = catalog.stack(name).project
    # What is imported is said in the file alone.
    if known is not None and known.model_copy(update={"imports": None}) == definition:
        return
    raise UsageError(
        f"there is a stack {name} already, and it is not that project with these extras and groups",
        why=f"{catalog.path('stacks', name)} has "
        + (f"project {known.path or known.git}." if known else "no project."),
        fix="Give the lock another name (--name), or correct [project] in that file and lock it: "
        f"envbuild lock --stack {name}",
    )


def _builds(packages: UvLock, targets: dict[str, Target], bases: dict[str, Base]) -> Iterator[Builds]:
    majors = cuda_packages(packages.packages)
    left_to_base = {override.name for override in packages.manifest.overrides if _is_left_out(override.marker)}
    # The first one is the default: the CPU where nothing is for CUDA.
    first = Device.CUDA if majors or left_to_base & {"torch"} else Device.CPU
    for target_name, target in sorted(targets.items(), key=lambda known: known[1].device is not first):
        names = [
            name
            for name, base in bases.items()
            if base.platform == target.platform
            and (base.device is Device.CUDA) == (target.device is Device.CUDA)
            and _has_cuda_of(base, majors)
            and left_to_base & {"torch"} <= base.provides.keys()
            and all(sm_problem(sm.rstrip("af"), base.cuda) is None for sm in target.sm if base.cuda)
        ]
        if names:
            yield Builds(target=target_name, bases=tuple(names), default_base=names[0])


def _has_cuda_of(base: Base, majors: Collection[str]) -> bool:
    return base.cuda_major in majors if majors else True


def _is_left_out(marker: str) -> bool:
    return "never" in marker


def _no_base(tree: ProjectTree, uv_lock: UvLock, bases: Collection[str]) -> ConfigurationError:
    return ConfigurationError(
        f"no base fits {tree.title}",
        why=f"Its {UV_LOCK} is for Python {SpecifierSet(uv_lock.requires_python)}. Bases: {', '.join(sorted(bases))}.",
        fix="Name a base with such a Python and its CUDA, or define one in envs/bases/: --base NAME --target NAME",
    )
