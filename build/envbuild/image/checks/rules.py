"""The checks: each yields what it finds in the scans of an image's layers.

Layers are checked one by one, since what an upper one hides is shipped all the same.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import Reporter
from envbuild.core.text import printable
from envbuild.image.checks import runtime
from envbuild.image.checks.contents import ImageContents, ImageFinding
from envbuild.image.record import CheckRecord
from envbuild.image.scan.content import secret_variables
from envbuild.image.scan.models import FAMILIES, GpuFile, read_listing
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.prebuilt import REQUIRED, PackageCode, lacks

# Paths of a finding that are named; the others are counted.
NAMED = 5
CACHES = re.compile(
    r"var/lib/apt/lists/(?!(lock|partial|auxfiles)$)."
    r"|var/cache/apt/(archives/.*\.deb|[^/]*\.bin)$"
    r"|(root|home/[^/]+)/\.cache/."
    r"|(tmp|var/tmp)/."
    r"|var/log/."
    r"|(.*/)?(uv_cache\.json|CACHEDIR\.TAG)$"
)


def setuid(image: ImageContents) -> Iterator[ImageFinding]:
    """Programs that run as another user, other than those of the base's Debian packages."""
    bits = stat.S_ISUID | stat.S_ISGID
    for scan, of_base in image.scans():
        for file in scan.special:
            if file.capabilities or (file.kind == "f" and file.mode & bits and not file.owned):
                why = "file capabilities" if file.capabilities else f"mode {file.mode:o}"
                # The base's own set-user-ID programs (su, mount) are part of the distribution.
                yield ImageFinding(text=f"/{file.path} has {why}, and no Debian package brings it", of_base=of_base)


def world_writable(image: ImageContents) -> Iterator[ImageFinding]:
    """What every user may change: files, and folders without the sticky bit."""
    for scan, of_base in image.scans():
        for file in scan.special:
            # The sticky bit keeps users from renaming or removing files of others: /tmp has it.
            if file.mode & stat.S_IWOTH and not (file.kind == "d" and file.mode & stat.S_ISVTX):
                yield ImageFinding(text=f"/{file.path} has mode {file.mode:o}", of_base=of_base)


def secrets(image: ImageContents) -> Iterator[ImageFinding]:
    """Credentials in variables, in labels, and in files that are not as their package brings them."""
    for scan, of_base in image.scans():
        # Test keys and examples that a wheel or a Debian package ships as published are no secrets.
        published = {hit.path for hit in scan.secrets if hit.vouched}
        for hit in scan.secrets:
            if hit.path not in published and _source_of(hit.path) not in published:
                yield ImageFinding(text=f"/{hit.path} holds {hit.what}", of_base=of_base)
    for kind, values in (("variable", image.variables), ("label", image.labels)):
        for name in secret_variables(values):
            yield ImageFinding(text=f"the {kind} {name} holds a credential")


def _source_of(path: str) -> str:
    """The source of a file of bytecode (PEP 3147), which no RECORD has a digest of; any other file itself."""
    folder, name = posixpath.split(path)
    if posixpath.basename(folder) != "__pycache__":
        return path
    return posixpath.join(posixpath.dirname(folder), f"{name.partition('.')[0]}.py")


def caches(image: ImageContents) -> Iterator[ImageFinding]:
    """Caches, lists and logs that can be made again."""
    for kept in image.layers:
        caches = [
            f"/{entry.path}"
            for entry in read_listing(kept.listing)
            if entry.kind == "f" and entry.size and CACHES.match(entry.path)
        ]
        if caches:
            of_base = kept.digest in image.of_base
            text = f"layer {kept.name} has {_some(caches)}"
            yield ImageFinding(text=text, of_base=of_base)


def builder_paths(image: ImageContents) -> Iterator[ImageFinding]:
    """Paths of the machine that built the image."""
    for scan, of_base in image.scans():
        by_folder: dict[str, list[str]] = {}
        for hit in scan.places:
            by_folder.setdefault(hit.what, []).append(f"/{hit.path}")
        for folder, paths in sorted(by_folder.items()):
            yield ImageFinding(text=f"{folder} is named in {_some(paths)}", of_base=of_base)


def duplicates(image: ImageContents) -> Iterator[ImageFinding]:
    """More than one copy of libraries of which a process must see one."""
    for family in FAMILIES:
        paths = sorted({path for scan, _ in image.scans() for path in scan.libraries.get(family, ())})
        folders = sorted({posixpath.dirname(path) for path in paths})
        # Two copies of libtorch or NCCL in one process have two sets of global state.
        if len(folders) > 1:
            yield ImageFinding(text=f"{family} is there more than once: {', '.join(f'/{one}' for one in folders)}")


def loaded(image: ImageContents) -> Iterator[ImageFinding]:
    """What a process that imported torch has loaded: one file of each library, and the environment's own."""
    by_name: dict[str, set[str]] = {}
    for path in image.loaded or ():
        name = posixpath.basename(path)
        for family, pattern in FAMILIES.items():
            if pattern.match(name):
                # Files of one library differ after .so at most; libcudnn_ops is another library than libcudnn.
                by_name.setdefault(name.partition(".so")[0], set()).add(path)
                if not path.startswith(f"{image.environment}/") and "torch" not in image.provided:
                    yield ImageFinding(text=f"torch loads {family} from {path}, which is not the environment's")
    for name, paths in sorted(by_name.items()):
        if len(paths) > 1:
            yield ImageFinding(text=f"torch loads {name} more than once: {', '.join(sorted(paths))}")


def architectures(image: ImageContents) -> Iterator[ImageFinding]:
    """GPU code: what was compiled for the target has exactly its SMs, and nothing runs without the rest having them."""
    if not image.sm:
        return
    packages = gpu_packages(image)
    for name, wanted in sorted(image.compiled.items()):
        actual = packages[name].architectures if name in packages else Architectures()
        # A wheel without GPU code passes: extensions of C++ alone are compiled in this phase too.
        if actual not in (wanted, Architectures()):
            yield ImageFinding(text=f"{name} contains {actual.text()}; compiled for the target is {wanted.text()}")
    for name, code in sorted(packages.items()):
        if REQUIRED.match(name) and not code.unknown and (lacking := lacks(code, image.sm)):
            has = code.main_file.architectures.text()
            text = f"{name} {code.version} has nothing for {', '.join(f'sm_{one}' for one in lacking)}, but {has}"
            yield ImageFinding(text=text)


def gpu_packages(image: ImageContents) -> dict[str, PackageCode]:
    """The packages with GPU code, and those without which nothing runs."""
    files: dict[tuple[str, str], list[GpuFile]] = {}
    for scan, _ in image.scans():
        for package in scan.python:
            if REQUIRED.match(package.name):
                files.setdefault((package.name, package.version), [])
        for file in scan.gpu:
            if file.package:
                files.setdefault((file.package, file.version), []).append(file)
    return {
        name: PackageCode(package=name, version=version, files=tuple(file.code for file in items))
        for (name, version), items in files.items()
    }


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(paths[:NAMED]) + more


ImageCheck = Callable[[ImageContents], Iterable[ImageFinding]]
RULES: dict[str, ImageCheck] = {
    "setuid": setuid,
    "world-writable": world_writable,
    "secrets": secrets,
    "caches": caches,
    "builder-paths": builder_paths,
    "duplicates": duplicates,
    "loaded": loaded,
    "architectures": architectures,
    "compiler": runtime.compiler,
    "cuda-headers": runtime.cuda_headers,
    "variables": runtime.variables,
}


# Raised when the same image would be judged otherwise.
FORMAT = 2
# The findings of a check that are printed; the record has all.
PRINTED = 20


def check_image(contents: ImageContents, allow: Collection[str], reporter: Reporter) -> dict[str, CheckRecord]:
    """Run every check; returns what each found, by its code.

    Args:
        allow: codes of checks whose findings do not refuse the image.

    Raises:
        CheckRefusedError: a check found something, and its code is not allowed.
    """
    findings = {code: list(rule(contents)) for code, rule in RULES.items()}
    own = {
        code: [finding for finding in items if not finding.of_base]
        for code, items in findings.items()
        if code not in allow
    }
    if codes := sorted(code for code, items in own.items() if items):
        error = CheckRefusedError(
            f"the image is refused: {', '.join(codes)}",
            why="\n".join(_lines(own)),
            fix="Find the package or base that brings it, and leave it out. To accept it, add "
            f"{' '.join(f'--allow {code}' for code in codes)}; the image's record lists what was allowed.",
        )
        error.codes = frozenset(codes)
        raise error
    for code, items in findings.items():
        for line in _lines({code: items}):
            reporter.note(f"note: {line}")
    return {
        code: CheckRecord(findings=tuple(str(finding) for finding in items), allowed=code in allow)
        for code, items in findings.items()
    }


def _lines(findings: Mapping[str, list[ImageFinding]]) -> list[str]:
    # Names in layers are foreign text.
    lines = [f"{code}: {printable(str(finding))}" for code, items in findings.items() for finding in items]
    return lines if len(lines) <= PRINTED else [*lines[:PRINTED], f"and {len(lines) - PRINTED} more"]
