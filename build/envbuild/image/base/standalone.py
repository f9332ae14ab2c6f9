"""The Python of a base whose distribution has another: a standalone build that uv installs, as a layer of its own."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from envbuild.catalog.base import Base, PythonSource
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import MACHINES
from envbuild.core import sandbox
from envbuild.core.errors import BuildError, CheckRefusedError, NetworkError
from envbuild.core.exit_status import describe_status, tail
from envbuild.core.files import machine_errors
from envbuild.core.process import ProcessOptions, run
from envbuild.core.progress import Reporter
from envbuild.core.sandbox import Bind, Sandbox
from envbuild.image.variables import LANG, PLAIN_PATH
from envbuild.lock.uv.program import uv_program, uv_version
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.layer_writer import EPOCH, LayerWriter, plain_rights

LAYER_NAME = "python"
COMPILER = "containers/native/compile_tree.py"
_INSIDE = "/run/envbuild"


class StandalonePython(NamedTuple):
    """The layer, and what made it."""

    layer: Layer
    made_by: str


def prefix_of(base: Base) -> PurePosixPath:
    """The folder of the Python, relative to the root: that of ``bin/python3.12``."""
    return PurePosixPath(base.python.executable).parents[1].relative_to("/")


def inputs(base: Base) -> dict[str, str]:
    """What makes it, besides the base's definition: each uv knows which patch release is the newest."""
    return {"standalone": uv_version()} if base.python.source is PythonSource.STANDALONE else {}


def download(folder: Path, base: Base, name: str, log: Path, reporter: Reporter) -> Path:
    """Have uv put the Python of the base ``name`` into a folder in ``folder``.

    Raises:
        NetworkError: uv cannot download it.
    """
    with reporter.step(f"download Python {base.python.version} with uv {uv_version()}"):
        return _install(folder / "standalone", base, name, log)


def add_python(installed: Path, rootfs: Path, base: Base, name: str, log: Path, reporter: Reporter) -> StandalonePython:
    """Put the Python of the base ``name`` into its root file system, and write the layer that has it.

    The layer's file is next to ``rootfs``.

    Args:
        installed: the folder that it was downloaded into.

    Raises:
        CheckRefusedError: something lies where it is to be put.
        BuildError: its standard library does not compile.
    """
    prefix = prefix_of(base)
    place = rootfs / prefix
    if place.exists() or place.is_symlink():
        raise CheckRefusedError(
            f"base {name} has something at /{prefix}, where its Python is put",
            why=f"python.executable of its file is {base.python.executable}, and python.source is standalone.",
            fix="Name another folder in python.executable, or write source = 'prefix' if that Python is the one meant.",
        )
    with reporter.step(f"install Python {base.python.version}"):
        _replace_path(installed, str(installed), f"/{prefix}")
        # uv calls the folder cpython-3.12.11-linux-x86_64-gnu.
        version = installed.name.split("-")[1]
        with machine_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            installed.rename(place)
        library = f"/{prefix}/lib/python{base.python.version}"
        compile_tree(rootfs, place, f"/{prefix}", library, base.python.executable, log)
    file = rootfs.parent / f"{LAYER_NAME}.tar.gz"
    with reporter.step(f"write layer {LAYER_NAME} of base {name}"), LayerWriter(file, EPOCH) as writer:
        for folder in reversed(prefix.parents[:-1]):
            writer.add_directory(str(folder))
        writer.add_directory(str(prefix))
        writer.add_tree(place, str(prefix), rights=plain_rights)
    return StandalonePython(Layer(writer.record(LAYER_NAME), file), f"CPython {version} by uv {uv_version()}")


def _install(folder: Path, base: Base, name: str, log: Path) -> Path:
    """The folder in ``folder`` that uv installed the Python into."""
    request = f"cpython-{base.python.version}-linux-{MACHINES[base.platform]}-gnu"
    # The base's file asks for it: what says whether uv may download one by itself is not meant.
    ours = {"UV_PYTHON_DOWNLOADS": "manual", "UV_PYTHON_INSTALL_DIR": str(folder)}
    environment = {key: value for key, value in os.environ.items() if key != "UV_PYTHON"} | ours
    finished = run(
        # --no-bin: uv otherwise puts an executable into this account's own bin folder as well (uv python install
        # --help).
        [uv_program(), "--color", "never", "--no-progress", "python", "install", request, "--no-bin"],
        what=f"install Python {base.python.version} for base {name}",
        log=log,
        check=False,
        options=ProcessOptions(env=environment, working_on=folder.parent),
    )
    # A link for the minor version lies next to it.
    pythons = [path for path in folder.glob("cpython-*") if not path.is_symlink()]
    if finished.status != 0 or len(pythons) != 1:
        raise NetworkError(
            f"cannot make base {name}: uv does not install Python {base.python.version}",
            why=f"uv {describe_status(finished.status)}:\n{tail(finished.output)}",
            fix="uv downloads standalone builds from GitHub. Where there is no way to it, name a mirror with uv's own "
            "UV_PYTHON_INSTALL_MIRROR, or a list of builds with UV_PYTHON_DOWNLOADS_JSON_URL.",
            log=log,
        )
    return pythons[0]


def _replace_path(tree: Path, before: str, after: str) -> None:
    """Replace the folder that uv wrote into text files (sysconfig's data) by the one where the Python will be."""
    for path in sorted(tree.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with machine_errors(path):
            data = path.read_bytes()
            # Not in binaries: a path of another length would move all that comes after it.
            if before.encode() in data and b"\0" not in data:
                path.write_bytes(data.replace(before.encode(), after.encode()))


def compile_tree(rootfs: Path, tree: Path, place: str, library: str, python: str, log: Path) -> None:
    """Compile the sources in a tree to bytecode with a base's Python: an image is read-only, and every process would
    compile them again.

    Args:
        place: where the tree will be, in a folder of the base; ``library``: the folder in it that is compiled.
    """
    script = data_root() / COMPILER
    box = Sandbox(
        root=rootfs,
        # The root is read-only: a place that it does not have is made on a tmpfs.
        opened=() if (rootfs / place.lstrip("/")).is_dir() else (place.rpartition("/")[0],),
        binds=(
            Bind(source=tree, target=place, writable=True),
            Bind(source=script, target=f"{_INSIDE}/{script.name}"),
        ),
        # Python before 3.11 writes the items of a frozenset in the order of their hashes (bpo-37596).
        environment={"PATH": PLAIN_PATH, "HOME": "/tmp", "LANG": LANG, "PYTHONHASHSEED": "0"},  # noqa: S108 - inside
    )
    # Without site-packages, whose .pth files could import and so change what the compiling process has interned.
    words = [python, "-S", "-s", f"{_INSIDE}/{script.name}", library, str(os.cpu_count() or 1)]
    run(
        box.command(sandbox.probe(), words),
        what=f"compile {library} to bytecode",
        log=log,
        options=ProcessOptions(env=box.process_environment(), error=BuildError, working_on=tree),
    )
