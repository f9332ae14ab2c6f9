"""Which packages of a lock are built for a target, from what, and under which key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.catalog.models import Target
from envbuild.catalog.recipe import WheelRecipe
from envbuild.catalog.stack import Phase
from envbuild.core.digests import digest_of
from envbuild.core.errors import CheckRefusedError, UsageError
from envbuild.lock.components.project_metadata import readable
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.models import LockedComponent
from envbuild.lock.record.content import Content, locked_content
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.key import KeyParts, TorchPart, front_digest
from envbuild.wheels.sources import SourceOrigin, WheelSources
from envbuild.wheels.toolchain.toolchain import Compilers

# What builds of torch extensions use whether they declare it or not.
USUAL_REQUIREMENTS = ("ninja", "packaging", "pip", "pybind11", "setuptools", "wheel")
# torch's own dependencies whose headers its own include.
HEADER_PACKAGES = ("nvidia-cudnn", "nvidia-nccl")


@dataclass(frozen=True, kw_only=True)
class WheelPlan:
    """A wheel that a lock needs on a target.

    Attributes:
        origin: what it is built from.
        modules: modules that must import in the finished environment.
        patches: names and contents of the changes to its sources, in their order.
    """

    parts: KeyParts
    origin: SourceOrigin
    recipe: WheelRecipe
    modules: tuple[str, ...]
    patches: tuple[tuple[str, bytes], ...] = ()

    @property
    def name(self) -> str:
        """The package and its version, for people."""
        return f"{self.parts.package} {self.parts.version}"

    @property
    def asked(self) -> Architectures:
        """What compilers are told to make."""
        return Architectures.named(self.parts.sm, self.parts.ptx)

    @property
    def expected(self) -> Architectures:
        """What the wheel must contain: nothing where the package has no GPU code."""
        return self.asked if self.recipe.gpu_code else Architectures()


def buildable(lock: LockDirectory) -> dict[str, SourceOrigin]:
    """The packages of the compile phase that are built here, and from what: those that come as wheels are not."""
    origins = {}
    for name, component in lock.lock.components.items():
        if component.phase is Phase.COMPILE and component.commit and component.git:
            origins[name] = git_origin(name, component)
        elif component.phase is Phase.COMPILE and component.sdist:
            index = component.index or ""
            origins[name] = SourceOrigin(package=name, version=component.version, sdist=component.sdist, index=index)
    return origins


def git_origin(name: str, component: LockedComponent) -> SourceOrigin:
    """What a component from git is built from."""
    return SourceOrigin(
        package=name,
        version=component.version,
        git=component.git or "",
        commit=component.commit or "",
        subdirectory=component.subdirectory or "",
    )


def choose(lock: LockDirectory, asked: Sequence[str]) -> tuple[str, ...]:
    """The packages to build: those asked for, or all.

    Raises:
        UsageError: one is not built by this lock.
    """
    known = buildable(lock)
    names = [canonicalize_name(name) for name in asked]
    for name in names:
        if name not in known:
            raise UsageError(
                f"{name} is not built for the lock of stack {lock.lock.stack} on {lock.lock.base.name}",
                why=f"Packages of its compile phase that are built here: {', '.join(known) or 'none'}.",
                fix="Name one of these with --package, or none to build them all.",
            )
    return tuple(dict.fromkeys(names)) or tuple(known)


def cuda_of(lock: LockDirectory, target: Target) -> str:
    """The CUDA version, major.minor, that a lock's wheels are compiled with.

    Raises:
        CheckRefusedError: the lock's base or the target is without CUDA.
    """
    if lock.lock.base.cuda is None or target.device is not Device.CUDA:
        side = f"The base {lock.lock.base.name} is" if lock.lock.base.cuda is None else "The target is"
        raise CheckRefusedError(
            f"wheels of stack {lock.lock.stack} cannot be compiled for this base and target",
            why=f"{side} without CUDA, and wheels are compiled for the SMs of a target with the CUDA of a base.",
            fix="Choose a base and a target with CUDA (`envbuild list bases`, `envbuild list targets`).",
        )
    return lock.lock.base.cuda


def plan_wheels(
    lock: LockDirectory,
    names: Sequence[str],
    target: Target,
    catalog: Catalog,
    compilers: Compilers,
    sources: WheelSources,
) -> tuple[WheelPlan, ...]:
    """The wheels of the packages ``names`` for a target, with some compilers.

    Raises:
        CheckRefusedError: phase main lacks what a build needs.
        NetworkError: an sdist that is not in the store cannot be downloaded.
    """
    main = locked_content(lock, ("main",))
    wanted = Architectures.for_target(target)
    plans = []
    for name in names:
        component, origin = lock.lock.components[name], buildable(lock)[name]
        recipe = catalog.wheel_recipe(name)
        patches = _patches(recipe, component.version, catalog)
        major = cuda_of(lock, target).partition(".")[0]
        texts = {"{sm_dotted}": wanted.torch_list(), "{sm}": ";".join(wanted.sass), "{cuda_major}": major}
        header_names = [f"{stem}-cu{major}" for stem in HEADER_PACKAGES]
        parts = KeyParts(
            package=name,
            version=component.version,
            sdist=origin.sdist,
            commit=origin.commit,
            subdirectory=origin.subdirectory,
            platform=lock.lock.base.platform,
            python="cp" + lock.lock.base.python.replace(".", ""),
            torch=_torch(lock, main),
            toolkit=compilers.source,
            toolkit_packages=dict(compilers.packages),
            cuda_toolkit=compilers.cuda,
            host_compiler=compilers.host,
            header_packages={package: main[package].version for package in header_names if package in main},
            headers=tuple(_filled(folder, texts) for folder in recipe.headers),
            sm=wanted.sass,
            ptx=wanted.ptx,
            glibc=lock.lock.base.glibc,
            build_requirements=_requirements(lock, main, origin, recipe, sources),
            variables={variable: _filled(value.value, texts) for variable, value in sorted(recipe.variables.items())},
            gpu_code=recipe.gpu_code,
            nvcc_front=front_digest(),
            patches=tuple(f"sha256:{sha256(content).hexdigest()}" for _, content in patches),
        )
        plans.append(WheelPlan(parts=parts, origin=origin, recipe=recipe, modules=component.modules, patches=patches))
    return tuple(plans)


def _patches(recipe: WheelRecipe, version: str, catalog: Catalog) -> tuple[tuple[str, bytes], ...]:
    # A specifier leaves pre-releases out unless they are allowed (PEP 440, "Handling of pre-releases").
    wanted = [
        patch.file for patch in recipe.patches if SpecifierSet(patch.versions).contains(version, prereleases=True)
    ]
    return tuple((file, catalog.patch(file)) for file in wanted)


def _filled(text: str, texts: dict[str, str]) -> str:
    for placeholder, value in texts.items():
        text = text.replace(placeholder, value)
    return text


def _torch(lock: LockDirectory, main: Content) -> TorchPart:
    torch = lock.lock.torch
    hashes = sorted(main["torch"].hashes) if "torch" in main else []
    # The files too: an index of one's own may serve another build of torch under the same version.
    return TorchPart(version=torch.version, build=torch.build, files=digest_of([*hashes]))


def _requirements(
    lock: LockDirectory, main: Content, origin: SourceOrigin, recipe: WheelRecipe, sources: WheelSources
) -> dict[str, str]:
    """What a build uses with its locked version; torch is a part of its own."""
    # Of a line that cannot be read the build itself says what is wrong.
    declared = [canonicalize_name(requirement.name) for requirement in readable(sources.build_requires(origin))]
    if missing := sorted(set(recipe.build_requirements) - set(main)):
        raise CheckRefusedError(
            f"{origin.package} cannot be built from the lock of stack {lock.lock.stack}",
            why=f"Its recipe (envs/wheels/{origin.package}.toml) needs {', '.join(missing)}, "
            "and phase main does not have it.",
            fix="Add it under [requirements] of the stack's file and lock again.",
        )
    # A lock without one of the usual ones is no error: not every build uses all of them.
    names = {*declared, *recipe.build_requirements, *USUAL_REQUIREMENTS} - {"torch"}
    return {package: main[package].version for package in sorted(names) if package in main}
