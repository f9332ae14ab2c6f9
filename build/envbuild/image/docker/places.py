"""How RUN steps reach the network as this machine does, as files of the build context.

They are mounted while a step runs: no variable, argument, label or line of history holds any of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

from envbuild.catalog.site import Site
from envbuild.core.files import machine_errors
from envbuild.image.docker.streams import Content
from envbuild.image.layers import network
from envbuild.image.layers.sandbox import INSIDE
from envbuild.lock.uv.torch_builds import TorchSource

NETWORK = f"{INSIDE}/network"
# Where folders of this machine with packages are seen; each step sees only what it installs from them.
PLACES = f"{INSIDE}/places"
HOSTS = Path("/etc/hosts")
# An index of files (PEP 503) is a folder a package deep; find-links folders are flat.
DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What steps see of this machine.

    Attributes:
        files: of the context, below ``network/``.
        folders: folders with packages, by where they are seen below :data:`PLACES`.
    """

    files: Mapping[str, Content]
    folders: Mapping[str, Path]

    def for_step(self, step: str, versions: Mapping[str, str]) -> dict[str, Content]:
        """The files of the context that a step needs from folders of this machine, below ``places/STEP/``.

        Args:
            versions: what it installs, version by canonical name.
        """
        found: dict[str, Content] = {f"places/{step}/.keep": b""}
        for place, folder in self.folders.items():
            with machine_errors(folder, "read"):
                for path in _packages(folder, versions, DEPTH):
                    found[f"places/{step}/{place}/{path.relative_to(folder).as_posix()}"] = path
            found.setdefault(f"places/{step}/{place}/.keep", b"")
        return found


def outside(site: Site, source: TorchSource, environ: Mapping[str, str]) -> Outside:
    """How steps of a build reach the network as this machine does."""
    access = network.access(site, source, NETWORK, environ)
    files: dict[str, Content] = {}
    folders: dict[str, Path] = {}
    for bind in access.binds:
        if not bind.target.startswith(f"{NETWORK}/"):
            continue  # the resolver's files, which the daemon sees to
        name = bind.target.removeprefix(f"{NETWORK}/")
        if bind.source.is_dir():
            folders[name] = bind.source
        else:
            with machine_errors(bind.source, "read"):
                files[f"network/{name}"] = bind.source.read_bytes()

    def seen(text: str) -> str:
        for name in folders:
            text = text.replace(f"{NETWORK}/{name}", f"{PLACES}/{name}")
        return text

    lines = [f"export {name}={shlex.quote(seen(value))}" for name, value in sorted(access.environment.items())]
    lines.append(shlex.join(["set", "--", *map(seen, access.uv_args)]))
    files["network/variables.sh"] = "".join(f"{line}\n" for line in lines).encode()
    return Outside(files=files, folders=folders)


def extra_hosts(text: str) -> list[str]:
    """The names of a hosts file besides this machine's own, as the daemon takes them: ``NAME:ADDRESS``."""
    found = []
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if not address.startswith("127.") and address != "::1":
            found += [f"{name}:{address}" for name in names if not name.startswith("ip6-")]
    return found


def _packages(folder: Path, versions: Mapping[str, str], depth: int) -> Iterator[Path]:
    """Files of these packages, and pages that list files."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if depth > 1:
                yield from _packages(path, versions, depth - 1)
        elif path.suffix == ".html" or _is_of(path.name, versions):
            yield path


def _is_of(file: str, versions: Mapping[str, str]) -> bool:
    try:
        if file.endswith(".whl"):
            name, version = parse_wheel_filename(file)[:2]
        else:
            name, version = parse_sdist_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return False
    wanted = versions.get(name)
    # uv takes a local build (2.9.0+cpu) for its public version too; the hash decides which it is.
    return wanted is not None and version.public == wanted.partition("+")[0]
