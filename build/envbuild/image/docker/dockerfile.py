"""Renders a Dockerfile that docker (classic builder and BuildKit), podman and kaniko build without envbuild.

It has no `# syntax=`, no heredocs and no `RUN --mount`: dockerd 20.10 without BuildKit, and kaniko, lack some of them.
What installs the environment is in stages of its own: no layer of the image has uv, wheels or requirements.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envbuild.catalog.site import index_variable
from envbuild.core.errors import CheckRefusedError
from envbuild.image.layers.sandbox import PREFIX, VENV
from envbuild.lock.lockfile import git_build_options
from envbuild.oci.models import RunConfig

# The first words of a Dockerfile: a folder with such a file may be replaced.
WRITTEN_BY = "# Written by `envbuild export --format dockerfile`"
# Where the stages see the context; the image has no such folder.
BUILD = "/build"
BASE_FILE, CONFIGURATION_FILE = "base.tar.gz", "configuration.tar.gz"
_CONTINUED = " \\\n    "
# Without a value uv uses its own default: as a lock, its Dockerfile names no host of a package index.
INDEX_OPTION = '${INDEX_URL:+--index-url "$INDEX_URL"}'
# As envbuild sets them: bytecode that does not depend on times (PEP 552), copies instead of links into a cache.
_UV_SETTINGS = (
    f"VIRTUAL_ENV={VENV}",
    "UV_PYTHON_DOWNLOADS=never",
    "UV_NO_CACHE=1",
    "UV_NO_PROGRESS=1",
    "UV_COMPILE_BYTECODE=1",
    "PYC_INVALIDATION_MODE=UNCHECKED_HASH",
)


@dataclass(frozen=True, kw_only=True)
class SourceArchive:
    """A package that is built from the archive `sources/NAME.tar.gz` of the context.

    Attributes:
        folder: the folder of the archive that is built.
        variables: of the build.
    """

    name: str
    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The folder that is built, as a stage sees it."""
        return f"{BUILD}/sources/{self.folder}"


@dataclass(frozen=True, kw_only=True)
class Compile:
    """The stage that compiles wheels.

    Attributes:
        toolchain: the instructions that install compilers, and the CUDA toolkit.
    """

    toolchain: Sequence[str]
    sources: Sequence[SourceArchive]


@dataclass(frozen=True, kw_only=True)
class DockerfileSpec:
    """What a Dockerfile states.

    Attributes:
        title: the stack, the base and the hardware.
        tag: a name for the image, as an example.
        base: `name@sha256:...`; empty for a base that is a tar of the context.
        python: the base's interpreter.
        sees_base: whether the environment sees packages of the base.
        torch_build: torch's build, such as ``cpu``; empty where every package index has it.
        phases: the requirement files of the context, by phase.
        own: files of a phase with the packages of an index of their own, by phase and the index's name.
        again: packages of phase main that are installed again, over the files of others.
        wheels: packages whose wheels are in the context.
        trees: packages from git that phase git builds.
        builds: what isolated builds of phase git are held to, a file of the context; empty: they share the environment.
        shared: the packages of phase git that are built without isolation even so.
        unset: variables of the base that the image does not have.
    """

    title: str
    tag: str
    config: RunConfig
    python: str
    base: str = ""
    sees_base: bool = False
    torch_build: str = ""
    phases: Sequence[str] = ("main",)
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    again: Sequence[str] = ()
    wheels: Sequence[str] = ()
    compiled: Compile | None = None
    trees: Sequence[SourceArchive] = ()
    builds: str = ""
    shared: Sequence[str] = ()
    unset: Sequence[str] = ()


def render(spec: DockerfileSpec) -> str:
    stages = [_head(spec), _base(spec), _main(spec)]
    if spec.compiled is not None:
        stages.append(_wheels(spec.compiled))
    stages += [_environment(spec), _image(spec)]
    return "\n\n".join("\n".join(stage) for stage in stages) + "\n"


def install(*words: str) -> str:
    """The command that installs pinned packages into the environment."""
    return " ".join(["uv pip install --no-deps", *words])


def index_argument(index: str) -> str:
    """The build argument with the address of an index that packages are locked from."""
    return index_variable(index).removeprefix("UV_") + "_URL"


def _from_indexes(spec: DockerfileSpec, phase: str, *words: str) -> list[str]:
    """The instructions that install a phase: from the package index, and what is of another one from that alone."""
    files = [(f"{phase}.txt", _indexes(spec))] if phase in spec.phases else []
    for index, file in spec.own.get(phase, {}).items():
        # Without its address there is no other place: the build ends with these words.
        address = f"${{{index_argument(index)}:?the address of index {index}}}"
        files.append((file, f'--default-index "{address}"'))
    again = [[f"--reinstall-package {name}"] for name in spec.again] if phase == "main" else []
    lines = []
    for file, options in files:
        lines.append(copy_lock(file))
        for more in [
            [],
            *again,
        ]:  # over the others' files of the same names, of which any may have stayed (over_others)
            command = install("--require-hashes", *words, *more)
            lines.append(f"RUN {command}{_CONTINUED}{options} --requirements {BUILD}/lock/{file}")
    return lines


def _indexes(spec: DockerfileSpec) -> str:
    """The options of uv that name the package indexes."""
    options = [INDEX_OPTION]
    if spec.torch_build:
        # Every file is pinned by its hash: searching both indexes cannot choose another one.
        options.append('${TORCH_INDEX_URL:+--index "$TORCH_INDEX_URL" --index-strategy unsafe-best-match}')
    return " ".join(options)


def copy_lock(name: str) -> str:
    """The instruction that copies a file of the lock."""
    return f"COPY lock/{name} {BUILD}/lock/"


def _head(spec: DockerfileSpec) -> list[str]:
    lines = [
        f"{WRITTEN_BY}: {spec.title}.",
        f"#   docker build --tag {spec.tag} .      (or docker buildx build, podman build, kaniko)",
        "#   --build-arg INDEX_URL=https://...   the package index; without it, uv's default",
    ]
    if spec.torch_build:
        lines.append(
            f"#   --build-arg TORCH_INDEX_URL=https://...   an index with torch's build {spec.torch_build}, "
            "where the package index lacks it"
        )
    lines += [f"#   --build-arg {index_argument(name)}=https://...   index {name}" for name in _own_indexes(spec)]
    return lines


def _base(spec: DockerfileSpec) -> list[str]:
    if spec.base:
        return ["# The base, by its digest.", f"FROM {spec.base} AS base"]
    return ["# The base, a root file system.", "FROM scratch AS base", f"ADD {BASE_FILE} /"]


def _index_arguments(spec: DockerfileSpec) -> list[str]:
    # In each stage again: an ARG ends with the stage that has it (Dockerfile reference, "ARG", "Scope").
    own = [index_argument(name) for name in _own_indexes(spec)]
    return ["ARG INDEX_URL", *(["ARG TORCH_INDEX_URL"] if spec.torch_build else []), *(f"ARG {name}" for name in own)]


def _own_indexes(spec: DockerfileSpec) -> list[str]:
    # Names that share an argument are one index (Site.indexes).
    return [*{index_argument(name): name for files in spec.own.values() for name in files}.values()]


def _main(spec: DockerfileSpec) -> list[str]:
    seen = " --system-site-packages" if spec.sees_base else ""
    lines = [
        "# Phase main: an empty environment, and what installs without the packages before it.",
        "FROM base AS main",
        # A base may set another user, who may not write below /opt.
        "USER 0",
        *_index_arguments(spec),
        f"ENV {_CONTINUED.join(_UV_SETTINGS)}",
        "COPY tools/uv /usr/local/bin/uv",
        f"RUN uv venv --python {spec.python} --no-project{seen} {VENV}",
    ]
    return lines + _from_indexes(spec, "main")


def _wheels(compiled: Compile) -> list[str]:
    lines = [
        "# Compiles the wheels that are not in the context. Only /wheels leaves this stage.",
        "FROM main AS wheels",
    ]
    lines += compiled.toolchain
    for source in compiled.sources:
        lines.append(f"ADD sources/{source.name}.tar.gz {BUILD}/sources/")
        lines.append(f"RUN {_build(source, '/wheels')}")
    return lines


def _build(source: SourceArchive, folder: str, options: str = "--no-build-isolation --no-config --offline") -> str:
    """The command that builds a wheel; by itself with the packages of the environment."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(source.variables.items())]
    return _CONTINUED.join([*variables, f"uv build --wheel {options} --out-dir {folder} {source.place}"])


def _environment(spec: DockerfileSpec) -> list[str]:
    """Phases compile and git; what has a wheel is installed from it."""
    lines = ["# Phases compile and git.", "FROM main AS environment", *_index_arguments(spec)]
    if spec.wheels:
        lines.append(f"COPY wheels/ {BUILD}/wheels/")
    compiled = spec.compiled.sources if spec.compiled is not None else ()
    if compiled:
        lines.append(f"COPY --from=wheels /wheels/ {BUILD}/wheels/")
    if names := [*spec.wheels, *(source.name for source in compiled)]:
        lines.append(f"RUN {_from_wheels(names)}")
    lines += _from_indexes(spec, "compile", "--no-build-isolation")
    builds = f"{BUILD}/lock/{spec.builds}" if spec.builds else ""
    if builds and (spec.trees or "git" in spec.phases):
        lines.append(copy_lock(spec.builds))
    for source in spec.trees:
        lines.append(f"ADD sources/{source.name}.tar.gz {BUILD}/sources/")
        words = [f"--build-constraints {builds} --no-config {_indexes(spec)}"] if builds else []
        lines.append(f"RUN {_build(source, f'{BUILD}/wheels', *words)}")
        lines.append(f"RUN {_from_wheels([source.name])}")
    if "git" in spec.phases:
        lines.append(copy_lock("git.txt"))
        options = [*git_build_options(builds, spec.shared), *([_indexes(spec)] if builds else [])]
        lines.append(f"RUN {install(*options, f'--requirements {BUILD}/lock/git.txt')}")
    # Where it sees the base's packages, uv lists those too.
    if not spec.sees_base:
        lines.append("# The environment has the locked packages and no others.")
        lines.append(copy_lock("packages.txt"))
        lines.append(f"RUN uv pip list --format freeze | diff {BUILD}/lock/packages.txt -")
    return lines


def _from_wheels(names: Sequence[str]) -> str:
    """The command that installs packages from the wheels in a stage; there is one wheel of each."""
    return install(f"--no-index --find-links {BUILD}/wheels", *names)


def _image(spec: DockerfileSpec) -> list[str]:
    """How containers start; what a base on a registry states of it, and images do not carry on, is taken back."""
    config = spec.config
    lines = ["# The image: the base, the environment, and envbuild's own files.", "FROM base"]
    # ADD unpacks a tar of the context; COPY would put the tar itself there.
    lines += [f"COPY --from=environment {PREFIX}/ {PREFIX}/", f"ADD {CONFIGURATION_FILE} /"]
    # A Dockerfile cannot take a variable of the base away, only empty it.
    variables = {**dict.fromkeys(spec.unset, ""), **config.variables}
    lines += [f"ENV {_CONTINUED.join(f'{name}={quoted(value)}' for name, value in variables.items())}"]
    labels = [f"{quoted(name)}={quoted(value)}" for name, value in sorted(config.labels)]
    lines += [f"LABEL {_CONTINUED.join(labels)}"] if labels else []
    # They come with the base, and the native image does not have them.
    lines += ["ENTRYPOINT []", "HEALTHCHECK NONE"] if spec.base else []
    lines += [f"VOLUME {json.dumps(list(config.volumes))}"] if config.volumes else []
    lines += [f"EXPOSE {' '.join(config.ports)}"] if config.ports else []
    lines += [f"STOPSIGNAL {config.stop_signal}"] if config.stop_signal else []
    lines += [f"WORKDIR {config.workdir}"] if config.workdir else []
    lines += [f"USER {config.user}"] if config.user else []
    return [*lines, f"CMD {json.dumps(list(config.command))}"]


def quoted(text: str) -> str:
    """A value of ENV or LABEL in which nothing is replaced."""
    if "\n" in text or "\r" in text:
        raise CheckRefusedError(
            "the image cannot be written as a Dockerfile",
            why=f"A label of its base has several lines, and a Dockerfile's has one: {text[:80]!r}.",
            fix="Build it with `envbuild image`, which keeps labels as they are.",
        )
    # The backslash first: after the others it would be put before their own.
    for character in '\\"$':
        text = text.replace(character, f"\\{character}")
    return f'"{text}"'
