"""The stage of a docker build that makes wheels of sources, where the wheelhouse lacks them.

They are compiled for the target's SMs by the variables that the recipes state. What `envbuild wheels` does beside that
(a script before nvcc, checks of what came out, a tag that is true, the wheelhouse) is not done here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.models import Device
from envbuild.core.digests import Json, sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.image.base import apt
from envbuild.image.docker.dockerfile import fragment, mounts, script
from envbuild.image.docker.plan import LOCK, commits_of, requirements_of, uv
from envbuild.image.docker.streams import Content
from envbuild.image.layers.sandbox import INSIDE, VENV
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.record.content import locked_content
from envbuild.rootfs.layer_writer import LayerWriter, plain_rights
from envbuild.wheels.build.unpack import SOURCE_DATE_EPOCH, apply_patches, unpack
from envbuild.wheels.plan import WheelPlan, buildable, plan_wheels
from envbuild.wheels.sources import SourceOrigin, WheelSources
from envbuild.wheels.toolchain.index_toolkit import pinned_packages
from envbuild.wheels.toolchain.toolchain import FIRST_INDEX_MAJOR, Compilers

MAIN, TOOLKIT = "wheels-main", "wheels-toolkit"
APT = f"{INSIDE}/apt"
COMPILERS = ("gcc", "g++", "make", "libc6-dev")
TOOLKIT_FOLDER = "/cuda"
_OWN_FILE = re.compile(r'"(/[^"]+)"')
_SIGNED_BY = re.compile(r"signed-by=(/[^]\s]+)")


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """The stage ``wheels``: its text, and what of the context it needs.

    Attributes:
        steps: the steps that see a part of the lock and of local folders, and the versions of what they install.
        digests: of files of the context that decide what comes out.
        outside: files of the context that say where the base's packages come from, which decide nothing.
    """

    stages: Sequence[str] = ()
    files: Mapping[str, Content] = field(default_factory=dict)
    steps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    digests: Mapping[str, Json] = field(default_factory=dict)
    outside: Mapping[str, Content] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Material:
    """What wheels are made of, and for whom."""

    selection: Selection
    lock: LockDirectory
    catalog: Catalog
    sources: WheelSources


def plan_compiling(material: Material, packages: Mapping[str, str], staged: Path) -> Compiling:
    """The stage that makes the wheels of some packages.

    Args:
        packages: version by canonical name.
        staged: a folder for the archives of their sources.

    Raises:
        CheckRefusedError: there is no toolkit for the base's CUDA on the package index.
        NetworkError: sources cannot be fetched.
    """
    lock, selection = material.lock, material.selection
    origins = {name: origin for name, origin in buildable(lock).items() if name in packages}
    plans = _plans(material, [*origins])
    files: dict[str, Content] = {f"lock/{MAIN}/main.txt": requirements_of(lock, "main")}
    versions = {name: package.version for name, package in locked_content(lock, ("main",)).items()}
    steps: dict[str, Mapping[str, str]] = {MAIN: versions}
    toolkit, home = "", "/usr/local/cuda"
    if plans:
        toolkit, home = _toolkit(material, files, steps)
    builds, digests = [], {}
    for name, origin in origins.items():
        archive = _archive(material, origin, plans.get(name), staged / "sources" / name)
        digests[f"sources/{name}"] = sha256_file(archive)
        files[f"sources/{name}/source.tar.gz"] = archive
        files[f"sources/{name}/variables.sh"] = _variables(material, origin, plans.get(name), home)
        builds.append(_build(name))
    install = uv("pip", "install", "--python", f"{VENV}/bin/python", "--no-deps", "--require-hashes", '"$@"')
    apt_mount = f"--mount=type=bind,source=apt,target={APT}"
    stage = fragment(
        "wheels",
        apt_mounts=f"{mounts(MAIN)} {apt_mount}",
        mounts=mounts(MAIN),
        compilers=" ".join([*COMPILERS, f"python{selection.base.python.version}-dev"]),
        python=selection.base.python.executable,
        install=f" && \\\n    {install} --requirements {LOCK}/main.txt" if versions else "",
    )
    outside = apt_files(material)
    return Compiling(stages=[stage, toolkit, *builds], files=files, steps=steps, digests=digests, outside=outside)


def tree_archives(material: Material, group: str, packages: Collection[str], staged: Path) -> dict[str, Content]:
    """Sources of packages from git that a step builds while it installs them, as files of the context."""
    found: dict[str, Content] = {}
    for name, item in commits_of(material.lock, packages).items():
        origin = SourceOrigin(package=name, version=item.version, git=str(item.git), commit=str(item.commit))
        found[f"built/{group}/{name}.tar.gz"] = _archive(material, origin, None, staged / "trees" / name)
    return found


def _plans(material: Material, names: Sequence[str]) -> dict[str, WheelPlan]:
    """How packages with GPU code are built; none where the target or the base is without CUDA."""
    lock, target = material.lock, material.selection.target
    if lock.lock.base.cuda is None or target.device is not Device.CUDA or not names:
        return {}
    compilers = Compilers(cuda="", host="")
    plans = plan_wheels(lock, names, target, material.catalog, compilers, material.sources)
    return {plan.parts.package: plan for plan in plans}


def _archive(material: Material, origin: SourceOrigin, plan: WheelPlan | None, folder: Path) -> Path:
    """A package's sources with the recipe's patches, as a tar in which they lie in ``source``."""
    tree = unpack(origin.package, material.sources.archive(origin), folder)
    if plan is not None:
        apply_patches(plan.name, tree, plan.patches)
    file = folder.with_suffix(".tar.gz")
    with LayerWriter(file, SOURCE_DATE_EPOCH) as writer:
        writer.add_tree(tree, "source", rights=plain_rights)
    return file


def _variables(material: Material, origin: SourceOrigin, plan: WheelPlan | None, home: str) -> bytes:
    """The variables of a build, as a shell sets them."""
    recipe = material.catalog.wheel_recipe(origin.package)
    values = {"LANG": "C.UTF-8", "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH), "PYTHONHASHSEED": "0"}
    values |= {"CC": "gcc", "CXX": "g++"}
    if origin.commit:
        values["SETUPTOOLS_SCM_PRETEND_VERSION"] = origin.version
    path = f"{VENV}/bin"
    if plan is None:
        values |= {name: item.value for name, item in recipe.variables.items() if "{" not in item.value}
    else:
        values |= {"CUDA_HOME": home, "CUDA_PATH": home, "PYTORCH_NVCC": f"{home}/bin/nvcc"}
        values |= {"NVCC_CCBIN": "g++", "CUDAHOSTCXX": "g++", "TORCH_CUDA_ARCH_LIST": plan.asked.torch_list()}
        values |= plan.parts.variables
        packages = f"{VENV}/lib/python{material.selection.base.python.version}/site-packages"
        if plan.parts.headers:
            values["CPATH"] = ":".join(f"{packages}/{folder}" for folder in plan.parts.headers)
        path += f":{home}/bin"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(values.items())]
    lines += [f'export PATH="{path}:$PATH"', 'export MAX_JOBS="$(nproc)" NVTE_BUILD_MAX_JOBS="$(nproc)"']
    return "".join(f"{line}\n" for line in lines).encode()


def _build(name: str) -> str:
    words = ["build", "--wheel", "--no-build-isolation", "--no-config", "--offline"]
    words += ["--python", f"{VENV}/bin/python", "--out-dir", "/wheels", "/build/source"]
    source = f"--mount=type=bind,source=sources/{name},target={INSIDE}/sources"
    return fragment("wheel", mounts=f"{mounts(MAIN)} {source}", build=uv(*words))


def _toolkit(material: Material, files: dict[str, Content], steps: dict[str, Mapping[str, str]]) -> tuple[str, str]:
    """The step that installs the CUDA toolkit, and where it is then; ``files`` and ``steps`` get what it needs.

    Raises:
        CheckRefusedError: the package index has none for the base's CUDA, and the base brings none.
    """
    cuda = str(material.lock.lock.base.cuda)
    major = int(cuda.partition(".")[0])
    if major < FIRST_INDEX_MAJOR:
        raise CheckRefusedError(
            f"the docker builder has no compiler for CUDA {cuda}",
            why=f"It takes the toolkit from the package index, which has none older than CUDA {FIRST_INDEX_MAJOR}.",
            fix=f"Build the wheels first, with a toolkit of this machine: envbuild wheels --stack "
            f"{material.selection.stack_name} --base {material.selection.base_name} --target "
            f"{material.selection.target_name}. This command takes them from the wheelhouse then.",
        )
    packages = pinned_packages(material.lock, cuda, material.sources)
    lines = [" ".join([f"{item.name}=={item.version}", *(f"--hash={one}" for one in item.hashes)]) for item in packages]
    files[f"lock/{TOOLKIT}/toolkit.txt"] = ("\n".join(lines) + "\n").encode()
    files["tools/toolkit.sh"] = script("toolkit.sh")
    steps[TOOLKIT] = {item.name: item.version for item in packages}
    home = f"{TOOLKIT_FOLDER}/nvidia/cu{major}"
    words = ["pip", "install", "--target", TOOLKIT_FOLDER, "--python", f"{VENV}/bin/python", "--no-deps"]
    install = uv(*words, "--require-hashes", '"$@"', "--requirements", f"{LOCK}/toolkit.txt")
    return fragment("toolkit", mounts=mounts(TOOLKIT), install=install, home=home), home


def apt_files(material: Material) -> dict[str, Content]:
    """Where the base's own packages come from, as apt reads it in the stage; keyrings and certificates with it."""
    base = material.selection.base
    sources = apt.sources_for(base, material.selection.base_name, material.sources.site.apt_mirror)
    files: dict[str, Content] = {}

    def taken(found: re.Match[str]) -> str:
        """The file as it is seen inside; one that is not here is not there either."""
        path = Path(found[1])
        if not path.is_file():
            return found[0]
        name = f"apt/files/{len(files)}-{path.name}"
        with machine_errors(path, "read"):
            files[name] = path.read_bytes()
        return found[0].replace(found[1], f"{INSIDE}/{name}")

    lines = [_SIGNED_BY.sub(taken, line) for line in sources.lines]
    options = [_OWN_FILE.sub(taken, option) for option in sources.options]
    options += [f'Dir::Etc::SourceList "{APT}/sources.list"', 'Dir::Etc::SourceParts "-"', 'APT::Sandbox::User "root"']
    files["apt/sources.list"] = "".join(f"{line}\n" for line in lines).encode()
    files["apt/apt.conf"] = "".join(f"{option};\n" for option in options).encode()
    proxies = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(sources.proxies.items()))
    files["apt/proxies.sh"] = proxies.encode()
    return files
