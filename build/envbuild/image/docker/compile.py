"""The stage of a Dockerfile that compiles wheels which the wheelhouse lacks, and the sources for it.

Packages are compiled for the target's SMs by the variables of their recipes. What `envbuild wheels` does besides (its
nvcc wrapper, the audit, the true platform tag) is not done there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.base import Base, Mmdebstrap
from envbuild.catalog.catalog import Selection
from envbuild.catalog.fields import Device
from envbuild.core.errors import CheckRefusedError
from envbuild.image.docker.dockerfile import BUILD, INDEX_OPTION, Compile, SourceArchive, copy_lock, install
from envbuild.image.layers.sandbox import VENV
from envbuild.lock.lockfile import LockDirectory
from envbuild.rootfs.layer_writer import LayerWriter, plain_rights
from envbuild.wheels.build.unpack import SOURCE_DATE_EPOCH, apply_patches, unpack
from envbuild.wheels.plan import WheelPlan, plan_wheels
from envbuild.wheels.sources import SourceOrigin, WheelSources, version_variables
from envbuild.wheels.toolchain.index_toolkit import pinned_packages
from envbuild.wheels.toolchain.toolchain import FIRST_INDEX_MAJOR, Compilers

COMPILERS = "gcc g++ make libc6-dev"
TOOLKIT = "/cuda"
TOOLKIT_SCRIPT = "containers/docker/toolkit.sh"


@dataclass(frozen=True, kw_only=True)
class SourceWriter:
    """Writes archives of sources into the context, and describes how each is built.

    Attributes:
        folder: of the context.
        work: a folder for unpacked sources.
    """

    lock: LockDirectory
    selection: Selection
    sources: WheelSources
    folder: Path
    work: Path

    def tree(self, origin: SourceOrigin) -> SourceArchive:
        """A package from git that phase git builds; sources without a history take their version from a variable."""
        tree = self._write(origin, None) / origin.subdirectory
        return SourceArchive(
            name=origin.package,
            folder=_folder(origin),
            variables=version_variables(origin.package, origin.version, tree),
        )

    def compiled(self, origins: Mapping[str, SourceOrigin]) -> Compile:
        """The stage for packages of phase compile.

        Raises:
            CheckRefusedError: the package index has no toolkit for the base's CUDA.
            NetworkError: sources cannot be fetched.
        """
        plans = self._plans([*origins])
        toolchain = _compilers(self.selection.base)
        home = ""
        if plans:
            toolkit, home = self._toolkit()
            toolchain += toolkit
        toolchain.append(
            f"ENV PATH={VENV}/bin:$PATH CC=gcc CXX=g++ PYTHONHASHSEED=0 SOURCE_DATE_EPOCH={SOURCE_DATE_EPOCH}"
        )
        listed = []
        for name, origin in origins.items():
            plan = plans.get(name)
            self._write(origin, plan)
            listed.append(
                SourceArchive(name=name, folder=_folder(origin), variables=self._variables(origin, plan, home)),
            )
        return Compile(toolchain=toolchain, sources=listed)

    def _plans(self, names: list[str]) -> dict[str, WheelPlan]:
        """How packages with GPU code are built; empty where the target or the base is without CUDA."""
        target = self.selection.target
        if self.lock.lock.base.cuda is None or target.device is not Device.CUDA:
            return {}
        # Their versions are part of a wheel's key, and such wheels are not kept.
        compilers = Compilers(cuda="", host="")
        plans = plan_wheels(self.lock, names, target, self.selection.catalog, compilers, self.sources)
        return {plan.parts.package: plan for plan in plans}

    def _write(self, origin: SourceOrigin, plan: WheelPlan | None) -> Path:
        """Write the archive of a package's sources, below its name, with the recipe's patches; returns the tree."""
        tree = unpack(origin.package, self.sources.archive(origin), self.work / origin.package)
        if plan is not None:
            apply_patches(plan.name, tree, plan.patches)
        file = self.folder / f"sources/{origin.package}.tar.gz"
        file.parent.mkdir(exist_ok=True)
        with LayerWriter(file, SOURCE_DATE_EPOCH) as writer:
            writer.add_tree(tree, origin.package, rights=plain_rights)
        return tree

    def _variables(self, origin: SourceOrigin, plan: WheelPlan | None, home: str) -> dict[str, str]:
        # The archive has no history that setuptools-scm could take a version from.
        values = {"SETUPTOOLS_SCM_PRETEND_VERSION": origin.version} if origin.commit else {}
        if plan is None:
            recipe = self.selection.catalog.wheel_recipe(origin.package)
            # A value with a placeholder ({sm}, {cuda_major}) is about GPU code, of which there is none here.
            return values | {name: stated.value for name, stated in recipe.variables.items() if "{" not in stated.value}
        values |= {"PYTORCH_NVCC": f"{home}/bin/nvcc", "TORCH_CUDA_ARCH_LIST": plan.asked.torch_list()}
        if plan.parts.headers:
            packages = f"{VENV}/lib/python{self.selection.base.python.version}/site-packages"
            # cuDNN's headers, for one, are in a package that torch depends on, below site-packages.
            values["CPATH"] = ":".join(f"{packages}/{folder}" for folder in plan.parts.headers)
        return values | dict(plan.parts.variables)

    def _toolkit(self) -> tuple[list[str], str]:
        """The instructions that install the CUDA toolkit of the package index, and where it is then."""
        cuda = str(self.lock.lock.base.cuda)
        major = int(cuda.partition(".")[0])
        if major < FIRST_INDEX_MAJOR:
            selection = self.selection
            raise CheckRefusedError(
                f"a Dockerfile cannot compile for CUDA {cuda}",
                why=f"The package index has no CUDA toolkit older than CUDA {FIRST_INDEX_MAJOR}.",
                fix=f"Build the wheels first, with a toolkit of this machine: envbuild wheels --stack "
                f"{selection.stack_name} --base {selection.base_name} --target {selection.target_name}\n"
                "The Dockerfile installs them then.",
            )
        packages = pinned_packages(self.lock, cuda, self.sources)
        lines = [
            " ".join([f"{one.name}=={one.version}", *(f"--hash={text}" for text in one.hashes)]) for one in packages
        ]
        (self.folder / "lock/toolkit.txt").write_text("\n".join(lines) + "\n")
        home = f"{TOOLKIT}/nvidia/cu{major}"
        options = f"{INDEX_OPTION} --requirements {BUILD}/lock/toolkit.txt"
        instructions = [
            "ARG INDEX_URL",
            copy_lock("toolkit.txt"),
            f"COPY tools/toolkit.sh {BUILD}/tools/",
            f"RUN {install('--require-hashes', f'--target {TOOLKIT}')} {options}",
            f"RUN sh {BUILD}/tools/toolkit.sh {home}",
            f"ENV CUDA_HOME={home} CUDA_PATH={home} NVCC_CCBIN=g++ CUDAHOSTCXX=g++ PATH={home}/bin:$PATH",
        ]
        return instructions, home


def _folder(origin: SourceOrigin) -> str:
    return f"{origin.package}/{origin.subdirectory}".rstrip("/")


def _compilers(base: Base) -> list[str]:
    """The instructions that install compilers with the base's apt."""
    instructions = []
    if isinstance(base.obtain, Mmdebstrap):
        # Such a base has no apt sources (containers/native/scrub.txt removes them), so the argument is required.
        # Security fixes are needed: libc6-dev depends on the exact version of libc6, and the base has the fixed one.
        suite, components = base.obtain.suite, " ".join(base.obtain.components)
        # Debian keeps security fixes next to the archive, .../debian-security for .../debian; Ubuntu's mirrors have
        # them within.
        security = "$APT_MIRROR-security" if base.distribution == "debian" else "$APT_MIRROR"
        places = [("$APT_MIRROR", suite), ("$APT_MIRROR", f"{suite}-updates"), (security, f"{suite}-security")]
        lines = " ".join(f'"deb {place} {name} {components}"' for place, name in places)
        given = f"${{APT_MIRROR:?name a mirror of {base.distribution}: --build-arg APT_MIRROR=http://...}}"
        write = f"printf '%s\\n' {lines} > /etc/apt/sources.list"
        instructions = ["ARG APT_MIRROR", f"RUN : {given} && \\\n    {write}"]
    packages = f"{COMPILERS} python{base.python.version}-dev"
    command = f"DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends {packages}"
    return [*instructions, f"RUN apt-get -q update && \\\n    {command}"]
