"""Which systems a wheel runs on: versions of symbols, and the platform tag that is true of it.

PEP 600: a wheel tagged ``manylinux_2_34`` runs on every mainstream distribution whose glibc is 2.34 or newer. What that
allows of the other system libraries (libstdc++, libgcc, ...) is written down in auditwheel's policies, which PyPI's own
tools use. A base is such a distribution: what the policy of its glibc allows, it has. So a base with glibc 2.36
has GLIBCXX_3.4.30, as Debian 12 really does, and one with 2.39 GLIBCXX_3.4.33.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import Policy, WheelPolicies

from envbuild.wheels.audit.binary import Binary, version_key

# NVIDIA's driver, which the machine with the GPU has and no wheel brings.
OF_THE_DRIVER = re.compile(r"^lib(cuda|nvidia-ml)\.so\.1$")
# Not counted, as in auditwheel 6 (elfutils.elf_find_versioned_symbols): every glibc system has its own loader.
_LOADER = re.compile(r"^ld-linux\S*\.so\.\d+$")
_GLIBC = re.compile(r"^GLIBC_2\.[0-9.]+$")


@dataclass(frozen=True, kw_only=True)
class Tag:
    """The platform tag that is true of a wheel.

    Attributes:
        platform: such as ``manylinux_2_34_x86_64``, or ``linux_x86_64`` where it qualifies for no policy.
        policy: such as ``manylinux_2_34``; empty for none.
        against: why it has none; empty where it has.
    """

    platform: str
    policy: str = ""
    against: tuple[str, ...] = ()


def too_new(binary: Binary, glibc: str, machine: str) -> Iterable[str]:
    """What a file needs that a base with a glibc does not have, for people."""
    policy = _policies(machine, glibc)[0]
    for library, version in _needed(binary):
        if _GLIBC.match(version):
            if version_key(version.removeprefix("GLIBC_")) > version_key(glibc):
                yield f"{binary.name} needs {version} of {library}, and the base has glibc {glibc}."
        elif not _allows(policy, version):
            yield (
                f"{binary.name} needs {version} of {library}, and a base with glibc {glibc} has "
                f"{_most(policy, version)} (PEP 600, {_plain(policy)})."
            )


def true_tag(binaries: Sequence[Binary], glibc: str, machine: str, provided: Collection[str]) -> Tag:
    """The tag of the oldest systems that a wheel runs on, none of them newer than the base.

    Args:
        provided: names of shared libraries that the locked environment has; they count as if the wheel had them.
    """
    own = {binary.name.rpartition("/")[2] for binary in binaries}
    against: tuple[str, ...] = ()
    for policy in reversed(_policies(machine, glibc)):
        against = tuple(reason for binary in binaries for reason in _against(binary, policy, own, provided))
        if not against:
            return Tag(platform=policy.name, policy=_plain(policy))
    return Tag(platform=f"linux_{machine}", against=against)


@functools.cache
def _policies(machine: str, glibc: str) -> tuple[Policy, ...]:
    """The policies that a base with a glibc satisfies, newest first."""
    known = WheelPolicies(libc=Libc.GLIBC, arch=Architecture(machine))
    fitting = [policy for policy in known if policy is not known.linux and _glibc_of(policy) <= version_key(glibc)]
    # An older glibc than any policy's is of no base; then the least is asked of it.
    return tuple(sorted(fitting, key=_glibc_of, reverse=True)) or (known.lowest,)


def _glibc_of(policy: Policy) -> tuple[int, ...]:
    return version_key(_plain(policy).removeprefix("manylinux_").replace("_", "."))


def _plain(policy: Policy) -> str:
    """``manylinux_2_34`` of ``manylinux_2_34_x86_64``."""
    return "_".join(policy.name.split("_")[:3])


def _needed(binary: Binary) -> Iterable[tuple[str, str]]:
    return [
        (library, version)
        for library, versions in binary.versions.items()
        for version in versions
        if not _LOADER.match(library)
    ]


def _allows(policy: Policy, version: str) -> bool:
    """Whether a policy allows a version of symbols; it says nothing of libraries that are none of the system's."""
    prefix, _, number = version.partition("_")
    return prefix not in policy.symbol_versions or number in policy.symbol_versions[prefix]


def _most(policy: Policy, version: str) -> str:
    prefix = version.partition("_")[0]
    numbers = [number for number in policy.symbol_versions[prefix] if version_key(number)]
    return f"{prefix} up to {max(numbers, key=version_key)}" if numbers else f"no {prefix}"


def _against(binary: Binary, policy: Policy, own: Collection[str], provided: Collection[str]) -> Iterable[str]:
    """Why a file does not qualify for a policy."""
    for library, version in _needed(binary):
        if not _allows(policy, version):
            yield f"{binary.name} needs {version} of {library}, which {_plain(policy)} does not have"
    for library in binary.libraries:
        theirs = library in own or library in provided or _LOADER.match(library) or OF_THE_DRIVER.match(library)
        if library not in policy.whitelist and not theirs:
            yield f"{binary.name} needs {library}, which {_plain(policy)} does not have"
        # As zlib's inflate_fast: a newer libz.so.1 need not have it any more.
        if names := sorted(policy.blacklist.get(library, frozenset()) & binary.symbols.undefined):
            yield f"{binary.name} uses what is private to {library}: {', '.join(names)}"
    # A manylinux tag promises x86_64 and no more: on an older processor the library would end with SIGILL.
    if binary.processor:
        yield f"{binary.name} asks for {binary.processor} processors"
