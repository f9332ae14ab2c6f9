"""Resolutions: uv locks a generated project, and its result becomes pins, hashes and dates."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from envbuild.catalog.base import Base
from envbuild.catalog.fields import MACHINES
from envbuild.core.digests import sha256_file
from envbuild.core.errors import MachineError, NetworkError, ResolutionError
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished
from envbuild.core.tomlread import Toml
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import PROJECT_FILE, UV_LOCK
from envbuild.lock.requirement_lines import PinnedRequirement, read_requirements
from envbuild.lock.uv.interpreter import for_any_python, with_requires_python
from envbuild.lock.uv.program import ignored_settings, refuse_ignored_settings, run_uv
from envbuild.lock.uv.torch_builds import TorchSource
from envbuild.lock.uv_lock import Packages, UvLock, parse_uv_lock

# uv's warning, with its reason if it has one.
_YANKED = re.compile(r"`([A-Za-z0-9._-]+)==[^`]+` is yanked(?: \(reason: \"([^\n]*)\"\))?")
# A glibc floor is still a preview of uv 0.13; naming it keeps uv from warning on every run.
PREVIEW = ("--preview-features", "minimum-libc-version")


@dataclass(frozen=True)
class Resolution:
    """What uv found.

    Attributes:
        yanked: the reason for each package that was taken though it is yanked: a pin or a preference names it.
        ignored_settings: uv's warning that it dropped settings of the project; empty: it did not.
    """

    uv_lock: UvLock
    ignored_settings: str = ""
    yanked: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def pins(self) -> Mapping[str, str]:
        """Version by package name, the project itself left out, and packages that are there more than once too."""
        # A package that is there once per marker has no one version; check_forks refuses it.
        there = Counter(package.name for package in self.uv_lock.locked)
        return {package.name: package.version for package in self.uv_lock.locked if there[package.name] == 1}

    @property
    def newest_upload(self) -> int:
        """The newest upload time among the locked files, seconds since 1970; 0 when none is known."""
        return max((seconds for package in self.uv_lock.locked for seconds in package.upload_seconds), default=0)

    @cached_property
    def packages(self) -> Packages:
        """The packages by name, without the project itself."""
        return {package.name: package for package in self.uv_lock.locked}


def lock_arguments(source: TorchSource) -> list[str]:
    """The words of ``uv lock`` for a project whose torch comes from ``source``."""
    return ["lock", *PREVIEW, *(source.uv_args() if source.kind == "find-links" else [])]


def resolve(
    project: Path,
    source: TorchSource,
    what: str,
    context: LockContext,
    *,
    settings_may_be_ignored: bool = False,
    from_cache: bool = False,
) -> Resolution:
    """Run ``uv lock`` in the folder ``project`` and read the uv.lock that it writes.

    Args:
        settings_may_be_ignored: whoever calls looks at ``ignored_settings`` of the result.
        from_cache: the same was resolved just now and is pinned, so that the index need not be asked again.
    """

    def lock(*more: str) -> Finished:
        finished = run_uv(
            [*lock_arguments(source), *more],
            what=what,
            log=context.log,
            cwd=project,
            on_line=context.reporter.update,
            most_seconds=context.most_seconds,
        )
        if not settings_may_be_ignored:
            refuse_ignored_settings(finished, what, context.log)
        return finished

    if from_cache:
        # By a uv.lock that is there uv prefers its wheels, and so asks for other metadata than the cache holds.
        with machine_errors(project):
            (project / UV_LOCK).unlink(missing_ok=True)
    try:
        finished = lock(*(["--offline"] if from_cache else []))
    except (ResolutionError, NetworkError):
        if not from_cache:
            raise
        finished = lock()  # a cache that is switched off, or was emptied in between
    return _read(project, finished)


def _read(project: Path, finished: Finished) -> Resolution:
    return Resolution(
        uv_lock=written_lock(project),
        ignored_settings=ignored_settings(finished.output),
        yanked={canonicalize_name(name): reason for name, reason in _YANKED.findall(finished.output)},
    )


def written_lock(project: Path) -> UvLock:
    """The uv.lock that uv wrote in a project's folder.

    Raises:
        MachineError: it has another form than envbuild knows.
    """
    try:
        uv_lock = parse_uv_lock((project / UV_LOCK).read_text())
        # uv leaves out versions of folders alone, of which a lock has none.
        if unversioned := [package.name for package in uv_lock.locked if not package.version]:
            raise ValueError(f"{unversioned[0]} has no version")
    except ValueError as error:
        raise MachineError(
            f"cannot understand the {UV_LOCK} that uv wrote",
            why=str(error),
            fix="Use the uv that is installed with envbuild: another version may write the file in another form.",
        ) from error
    return uv_lock


def resolve_without_interpreter(
    project: str, folder: Path, source: TorchSource, what: str, context: LockContext
) -> Resolution:
    """:func:`resolve` by the Python that envbuild runs in, whatever the project requires: nothing is built for it.

    Args:
        project: the text of its pyproject.toml, which stays in the folder.
    """
    file, uv_lock = folder / PROJECT_FILE, folder / UV_LOCK
    with machine_errors(folder):
        file.write_text(for_any_python(project))
    arguments = [*lock_arguments(source), "--python", sys.executable]
    finished = run_uv(arguments, what=what, log=context.log, cwd=folder, on_line=context.reporter.update)
    refuse_ignored_settings(finished, what, context.log)
    with machine_errors(folder):
        uv_lock.write_text(with_requires_python(uv_lock.read_text(), project))
        file.write_text(project)
    return _read(folder, finished)


def export(project: Path, extra: str | None, what: str, log: Path) -> list[PinnedRequirement]:
    """What ``uv export`` writes of a project's uv.lock."""
    # --frozen: what was resolved and checked is exported; uv must not look at the index again.
    arguments: list[str | Path] = ["export", *PREVIEW, "--frozen", "--format", "requirements.txt"]
    arguments += ["--no-emit-project", "--no-header", "--quiet", *(["--extra", extra] if extra else [])]
    return read_requirements(run_uv(arguments, what=what, log=log, cwd=project).output)


def with_local_hashes(
    requirements: Iterable[PinnedRequirement], resolution: Resolution, source: TorchSource
) -> list[str]:
    """Their lines, with the hashes that uv does not know: those of wheels in a local find-links folder."""
    done: list[str] = []
    for requirement in requirements:
        if requirement.hashes:
            done.append(requirement.text)
            continue
        hashes = sorted(sha256_file(wheel) for wheel in _local_wheels(requirement.name, resolution, source))
        if not hashes:
            raise NetworkError(
                f"the index states no sha256 of {re.split(r'[ ;]', requirement.text)[0]}",
                why="Without it, a lock cannot tell a replaced file, and none is taken from its files by itself.",
                fix="Serve it from an index or page that states sha256 hashes, or from a folder of find-links; or pin "
                f"another version: --pin {requirement.name}=VERSION",
            )
        head, *comments = requirement.text.split("\n")
        pieces = [head, *(f"    --hash={digest}" for digest in hashes)]
        done.append("\n".join([" \\\n".join(pieces), *comments]))
    return done


def _local_wheels(name: str, resolution: Resolution, source: TorchSource) -> list[Path]:
    folder = source.folder()
    if folder is None:
        return []
    listed = {
        Path(file.path or file.filename).name
        for package in resolution.uv_lock.packages
        if package.name == name
        for file in package.wheels
    }
    return [
        path
        for path in sorted(folder.glob("*.whl"))
        if path.name in listed and canonicalize_name(parse_wheel_filename(path.name)[0]) == name
    ]


def limits(base: Base) -> dict[str, Toml]:
    """The keys of ``[tool.uv]`` that keep a resolution to what a base can install."""
    # For one platform: uv resolves for all of them otherwise, and the NeMo 2.3 recipe forks for s390x. For the base's
    # glibc: nvidia-resiliency-ext has had wheels for 2.39 alone since 0.5.0, and no sdist. Without the floor uv locks
    # it, and cannot install it on Debian 12; with 2.35 it takes 0.4.1 (uv 0.13.8).
    marker = (
        f"sys_platform == 'linux' and platform_machine == '{MACHINES[base.platform]}' "
        "and implementation_name == 'cpython'"
    )
    return {"environments": [marker], "minimum-libc-version": {"glibc": base.glibc}}


def throw_away(project: str, context: LockContext) -> Path:
    """A new folder with this pyproject.toml, for a resolution that is not kept.

    New, since uv prefers the versions of an existing uv.lock: no answer may depend on an earlier one.
    """
    with machine_errors(context.folder):
        folder = Path(tempfile.mkdtemp(dir=context.folder, prefix="throw-away."))
        (folder / PROJECT_FILE).write_text(project)
    return folder
