"""Renders the Dockerfile from the templates in containers/docker/: readable on its own, and without anything of a site.

No ``# syntax=`` (it would pull a frontend image) and no heredocs: the BuildKit in dockerd 20.10 understands all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.core.errors import InternalError
from envbuild.image.docker.places import NETWORK, PLACES
from envbuild.image.docker.plan import LOCK, MADE, TOOLS, Install, uv
from envbuild.image.layers.sandbox import BUILT, INSIDE, VENV
from envbuild.lock.uv.program import uv_version
from envbuild.oci.write import RunConfig
from envbuild.rootfs.layer_writer import EPOCH

TEMPLATES = "containers/docker"
# uv's cache outlives a build: a step that runs again downloads nothing again.
CACHE = f"--mount=type=cache,id=envbuild-uv,target={INSIDE}/cache"
CONTINUED = " \\\n    "
# The step that makes an empty environment.
START = "python"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a Dockerfile says.

    Attributes:
        base: files of the base's layers in the context, lowest first; empty where ``reference`` is.
        reference: the base as an image, ``name@sha256:...``, or as it was loaded into the daemon.
        sees_base: whether the environment sees packages that the base brings.
        compile: the stage that makes wheels, rendered; empty when there are none to make.
    """

    title: str
    python: str
    python_version: str
    config: RunConfig
    installs: Sequence[Install]
    base: Sequence[str] = ()
    reference: str = ""
    sees_base: bool = False
    compile: Sequence[str] = field(default_factory=tuple)

    @property
    def site_packages(self) -> str:
        """The environment's packages, as seen in the image."""
        return f"{VENV}/lib/python{self.python_version}/site-packages"


def render(recipe: Recipe) -> str:
    """The Dockerfile of a recipe."""
    text = "the base's layers" if recipe.base else "nothing: the base is an image"
    parts = [fragment("head", title=recipe.title, uv=uv_version(), base_text=text)]
    if recipe.base:
        parts.append(fragment("base-archive", add="\n".join(f"ADD {name} /" for name in recipe.base)))
    else:
        parts.append(fragment("base-registry", reference=recipe.reference))
    parts += recipe.compile
    settle = _settle(recipe)
    words = ["venv", "--python", recipe.python, "--no-project"]
    venv = uv(*words, *(["--system-site-packages"] if recipe.sees_base else []), VENV)
    parts.append(fragment("environment", mounts=mounts(START), venv_command=venv, settle=settle))
    for install in recipe.installs:
        count = len(install.group.packages)
        parts.append(
            fragment(
                "group",
                group=install.group.name,
                count=f"{count} package{'' if count == 1 else 's'}",
                mounts=mounts(install.group.name, built=install.built, made=install.made),
                commands=f" &&{CONTINUED}".join(install.commands),
                settle=settle,
                python=recipe.python,
                site_packages=recipe.site_packages,
            )
        )
    parts.append(
        fragment(
            "finish",
            mounts=CONTINUED.join([*_scratch(), _bind("tools", TOOLS), _bind("lock/all", LOCK), _from_base()]),
            python=recipe.python,
            site_packages=recipe.site_packages,
            env="\n".join(f"ENV {name}={quoted(value)}" for name, value in _variables(recipe.config)),
            labels="\n".join(f"LABEL {quoted(name)}={quoted(value)}" for name, value in sorted(recipe.config.labels)),
            start="\n".join(_start(recipe)),
        )
    )
    return "".join(parts)


def fragment(template: str, **values: str) -> str:
    """A template with its placeholders filled."""
    text = (data_root() / TEMPLATES / f"{template}.Dockerfile").read_text(encoding="utf-8")
    known = {"inside": INSIDE, "tools": TOOLS, "venv": VENV, **values}
    for name, value in known.items():
        text = text.replace(f"@{name.upper()}@", value)
    return text


def script(name: str) -> bytes:
    """A script of containers/docker/ as steps see it."""
    text = (data_root() / TEMPLATES / name).read_text(encoding="utf-8")
    return text.replace("@INSIDE@", INSIDE).replace("@VENV@", VENV).encode()


def mounts(step: str, *, built: bool = False, made: bool = False) -> str:
    """What a step sees besides the image; nothing of it stays.

    /run is a file system of its own, so that places to mount things at are made there and not in the image; temporary
    files go there, too.
    """
    words = [*_scratch(), _bind("tools", TOOLS), _bind("network", NETWORK)]
    words += [_bind(f"lock/{step}", LOCK), _bind(f"places/{step}", PLACES)]
    words += [_bind(f"built/{step}", BUILT)] if built else []
    words += [f"--mount=type=bind,from=wheels,source=/wheels,target={MADE}"] if made else []
    return CONTINUED.join([*words, CACHE])


def _scratch() -> list[str]:
    # Not /tmp, too: podman 4.3 empties the image behind a step that has a file system of its own there.
    return ["--mount=type=tmpfs,target=/run"]


def _bind(source: str, target: str) -> str:
    return f"--mount=type=bind,source={source},target={target}"


def _from_base() -> str:
    return f"--mount=type=bind,from=base,source=/,target={INSIDE}/base"


def _settle(recipe: Recipe) -> str:
    words = [recipe.python, "-S", "-s", f"{TOOLS}/settle.py", "environment", VENV, recipe.python_version]
    return " ".join([*words, str(EPOCH), f"{LOCK}/step.json"])


def _variables(config: RunConfig) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (entry.partition("=") for entry in config.environment)]


def _start(recipe: Recipe) -> list[str]:
    """How containers start. What a base that is an image says and images do not carry on is taken back."""
    config = recipe.config
    lines = ["ENTRYPOINT []", "HEALTHCHECK NONE"] if recipe.reference else []
    lines += [f"VOLUME {json.dumps(list(config.volumes))}"] if config.volumes else []
    lines += [f"EXPOSE {' '.join(config.ports)}"] if config.ports else []
    lines += [f"STOPSIGNAL {config.stop_signal}"] if config.stop_signal else []
    lines += [f"WORKDIR {config.workdir}"] if config.workdir else []
    lines += [f"USER {config.user}"] if config.user else []
    return [*lines, f"CMD {json.dumps(list(config.command))}"]


def quoted(text: str) -> str:
    """A value as ENV and LABEL read it back: nothing in it is replaced."""
    if "\n" in text or "\r" in text:
        raise InternalError("a value in a Dockerfile holds the end of a line", why=repr(text))
    for character in '\\"$':
        text = text.replace(character, f"\\{character}")
    return f'"{text}"'


def tools(program: Path) -> Mapping[str, bytes | Path]:
    """The files that steps run, by their names in the context."""
    root = data_root()
    return {
        "tools/uv": program,
        "tools/steps.sh": script("steps.sh"),
        "tools/settle.py": script("settle.py"),
        "tools/compile_tree.py": (root / "containers/native/compile_tree.py").read_bytes(),
        "tools/records.py": (Path(__file__).parents[1] / "layers/dist_info.py").read_bytes(),
    }
