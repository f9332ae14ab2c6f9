"""Differences between the environment and the lock."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from envbuild_smoke.environment import installed, libraries
from envbuild_smoke.environment.bytecode import bytecode_findings
from envbuild_smoke.environment.distributions import normalize
from envbuild_smoke.environment.foreign_modules import ListedFiles, startup_findings
from envbuild_smoke.environment.imported import Ready
from envbuild_smoke.environment.inventory import MODULES, ImportedModule, versions
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.results import Finding, Image


def all_findings(
    plan: Plan,
    ready: Ready,
    files: Sequence[Finding],
    listed: ListedFiles,
    image: Image | None = None,
) -> list[Finding]:
    """Return all differences from the lock.

    `ready` is what the fork server reported, `files` are the findings about files, `listed` the files that may be
    imported, `image` describes the image this runs in.
    """
    result = version_findings(plan.expected_versions, ready.modules)
    result += files
    # One wrong module is one finding, though it is seen twice: where it would be imported from, and where it was.
    reported = {(each.code, each.found) for each in result}
    elsewhere = _imported_elsewhere(plan, ready.modules)
    result += [each for each in elsewhere if (each.code, each.found) not in reported]
    result += listed.findings(ready.imported)
    # The folders of packages: the standard library and zip files hold none of these libraries.
    folders = [folder for folder in sys.path if Path(folder).is_dir() and folder.endswith("-packages")]
    for name, paths in libraries.twice(libraries.packaged(folders), ready.libraries).items():
        result.append(Finding("library-twice", name, None, ", ".join(paths)))
    result += startup_findings(ready.started)
    if image is not None:
        result += _other_python(image)
    for module, error in ready.missing.items():
        result.append(Finding("module-missing", module, None, error))
    return result


def _imported_elsewhere(plan: Plan, modules: Mapping[str, ImportedModule]) -> list[Finding]:
    """Return `shadowed` for what was really imported, and does not come from the package that the lock has."""
    locked = {normalize(name) for name in plan.expected_versions}
    wanted = {name: package for name, package in MODULES.items() if package in locked}
    files = {package: modules[name].file if name in modules else None for name, package in wanted.items()}
    return installed.shadowed(installed.recorded(files), path=(), imported=files)


def _other_python(image: Image) -> list[Finding]:
    """Return `other-python` when this is not the Python that the image has the lock's packages for."""
    # The prefix and not the interpreter: bin/python of a virtual environment is a link to the base's.
    own = (image.fingerprint or {}).get("python")
    if not isinstance(own, str) or os.path.realpath(Path(own).parents[1]) == os.path.realpath(sys.prefix):
        return []
    return [Finding("other-python", None, own, sys.executable)]


def file_findings(plan: Plan) -> list[Finding]:
    """Return the findings about the files of the lock's packages."""
    files = installed.recorded(plan.expected_versions)
    bytecode = bytecode_findings(files, plan.expected_modules)
    return installed.file_findings(files) + installed.shadowed(files) + bytecode


def version_findings(expected: Mapping[str, str], imported: Mapping[str, ImportedModule]) -> list[Finding]:
    """Compare the environment with the lock's versions.

    Codes: `package-missing`, `version-mismatch` (metadata against the lock), `package-twice` (two copies of
    a locked package on the path), `imported-version-differs` (the module that was really imported).
    """
    installed, result = versions(), []
    for package, version in expected.items():
        # Exact, with the local part: 2.13.0+cpu and 2.13.0+cu130 are different builds.
        own = installed.get(normalize(package), [])
        if not own:
            result.append(Finding("package-missing", package, version, None))
            continue
        if own[0] != version:
            result.append(Finding("version-mismatch", package, version, own[0]))
        if len(own) > 1:
            result.append(Finding("package-twice", package, version, ", ".join(own)))
    for module, package in MODULES.items():
        seen = imported[module].version if module in imported else None
        wanted = next((v for name, v in expected.items() if normalize(name) == package), None)
        # Modules often leave out the local part ("+cpu"), or carry one that the metadata lacks.
        if seen and wanted and _public(seen) != _public(wanted):
            result.append(Finding("imported-version-differs", package, wanted, seen))
    return result


def _public(version: str) -> str:
    return version.partition("+")[0]
