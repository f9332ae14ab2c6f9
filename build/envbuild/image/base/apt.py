"""The machine's apt: which of its sources have a suite, and which of its settings reach them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import HostDistribution
from envbuild.core.errors import ConfigurationError
from envbuild.core.process import answer, find_tool

_FIELDS = ("REPO_URI", "RELEASE", "CODENAME", "ORIGIN", "COMPONENT", "SIGNED_BY", "SOURCESENTRY")
# apt prints a field that a source does not have as its own name.
_FORMAT = "\t".join(f"$({field})" for field in _FIELDS)
# How repositories are reached and trusted; nothing about what is installed.
_ACCESS = re.compile(
    r"Acquire::(https?::(Proxy(-Auto-Detect|::.+)|Timeout|CaInfo|CaPath|Verify-Peer|Verify-Host|SslCert|SslKey|No-Cache)"
    r"|Retries|ForceIPv[46]|Check-Valid-Until|Check-Date|Max-ValidTime)$"
)
# apt reads these below its own Dir::Etc, which is another one while a base is made.
_CREDENTIALS = {"Dir::Etc::netrc", "Dir::Etc::netrcparts"}
_PROXIES = {"Acquire::http::Proxy": "http_proxy", "Acquire::https::Proxy": "https_proxy"}


# In the site's mirror: the moment whose packages are wanted, as Debian's archive of snapshots has it in its paths.
SNAPSHOT = "{snapshot}"
_SNAPSHOT_FORMAT = "%Y%m%dT%H%M%SZ"


def at_moment(base: Base, mirror: str | None, moment: datetime) -> str | None:
    """The site's mirror; of one that keeps snapshots, the sources that it had at a moment."""
    if mirror is None or SNAPSHOT not in mirror:
        return mirror
    lines = mirror_lines(base, mirror.replace(SNAPSHOT, moment.strftime(_SNAPSHOT_FORMAT)))
    # A suite's Release file says until when it is valid, and a snapshot is old (sources.list(5)).
    option = "check-valid-until=no"
    return "\n".join(
        line.replace("deb [", f"deb [{option} ", 1) if line.startswith("deb [") else f"deb [{option}]{line[3:]}"
        for line in lines
    )


@dataclass(frozen=True)
class Keyring:
    """The keys of a distribution's archive, and the package that has them, here and on other distributions."""

    path: Path
    package: str


KEYRINGS = {
    "debian": Keyring(Path("/usr/share/keyrings/debian-archive-keyring.gpg"), "debian-archive-keyring"),
    "ubuntu": Keyring(Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg"), "ubuntu-keyring"),
}


def keyring_help(base: Base) -> str:
    """What to install before a mirror of the base's distribution can be checked here; empty where it is there."""
    keyring = KEYRINGS[base.distribution]
    return "" if keyring.path.is_file() else f" Its keys are in package {keyring.package}: apt-get install it."


@dataclass(frozen=True, kw_only=True)
class AptSources:
    """What mmdebstrap is fed with: one-line sources, settings of apt, and proxies as environment variables."""

    lines: tuple[str, ...]
    options: tuple[str, ...]
    proxies: dict[str, str]

    def text(self) -> bytes:
        """The sources as a sources.list."""
        return "".join(f"{line}\n" for line in self.lines).encode()


def suites_of(base: Base) -> tuple[str, ...]:
    """The suites a base draws from: the release, its updates, its security fixes."""
    # Debian names the suite of security fixes so since release 11; before, it was SUITE/updates.
    suite = base.archive.suite
    return suite, f"{suite}-updates", f"{suite}-security"


def sources_for(base: Base, base_name: str, mirror: str | None) -> AptSources:
    """Where the packages of ``base`` come from: the site's mirror, else this machine's own sources.

    Of another release of this machine's distribution: the same archives, which have them all.

    Args:
        mirror: the site's ``apt_mirror``: a URL, or whole one-line sources (``deb ...``).

    Raises:
        ConfigurationError: this machine has no sources for the base, and no mirror is set.
        MachineError: there is no apt on this machine.
    """
    apt_get, apt_config = find_tool("apt-get", "apt"), find_tool("apt-config", "apt")
    options, proxies = access(answer([apt_config, "dump"], what="read apt's settings"))
    if mirror:
        return AptSources(lines=mirror_lines(base, mirror), options=options, proxies=proxies)
    # apt-get(8), indextargets: one line for each index, and of those only the lists of binary packages.
    asking: list[str | Path] = [apt_get, "indextargets", "--format", _FORMAT, "Created-By: Packages"]
    listed = answer(asking, what="ask apt for this machine's sources")
    lines = lines_for(base, listed.splitlines())
    if not lines:
        raise ConfigurationError(
            f"this machine's apt sources do not have {base.archive.suite}, which base {base_name} is made of",
            why=_known(base, listed.splitlines()),
            fix="Choose the base of this machine's distribution with --base, or name a mirror that has the suite: "
            "ENVBUILD_APT_MIRROR=URL, or apt_mirror in the site configuration." + keyring_help(base),
        )
    return AptSources(lines=lines, options=options, proxies=proxies)


def mirror_lines(base: Base, mirror: str) -> tuple[str, ...]:
    """The sources of a mirror that was named."""
    if mirror.startswith("deb "):
        return tuple(line.strip() for line in mirror.splitlines() if line.strip())
    release, updates, security = suites_of(base)
    # apt trusts the archive of its own distribution alone; mmdebstrap takes its keys, and adds none to such lines.
    keyring, own = KEYRINGS[base.distribution], HostDistribution.here().distribution
    option = f"[signed-by={keyring.path}] " if own != base.distribution and keyring.path.is_file() else ""
    components = " ".join(base.archive.components)
    # Ubuntu's mirrors carry the security fixes with the release; Debian keeps them in an archive of their own.
    suites = [release, updates, *([security] if base.distribution == "ubuntu" else [])]
    return tuple(f"deb {option}{mirror} {suite} {components}" for suite in suites)


def _suite(base: Base, values: Mapping[str, str]) -> str:
    """The suite of ``base`` that a source has, if any."""
    # A source may name its suite by what it is now ("stable"); the codename names the suite then.
    return next((name for name in (values["RELEASE"], values["CODENAME"]) if name in suites_of(base)), "")


def _other_release(base: Base, values: Mapping[str, str]) -> str:
    """The suite of ``base`` in the place of the same one of another release: trixie-security of bookworm-security."""
    _, dash, kind = values["RELEASE"].partition("-")
    name = f"{base.archive.suite}{dash}{kind}"
    return name if values["ORIGIN"].lower() == base.distribution and name in suites_of(base) else ""


def lines_for(base: Base, listed: Sequence[str]) -> tuple[str, ...]:
    """One-line sources of the suites and components of ``base``, from apt's index targets."""
    return _lines(base, listed, _suite) or _lines(base, listed, _other_release)


def _lines(base: Base, listed: Iterable[str], suite_of: Callable[[Base, Mapping[str, str]], str]) -> tuple[str, ...]:
    parts_of: dict[tuple[int, str, str, str], set[str]] = {}
    suites = suites_of(base)
    for line in listed:
        values = _values(line)
        if values is None:
            continue
        suite = suite_of(base, values)
        if not suite or values["COMPONENT"] not in base.archive.components:
            continue
        # The installer leaves such a line in sources.list; mmdebstrap cannot read a disc.
        if values["REPO_URI"].startswith("cdrom:"):
            continue
        key = values["SIGNED_BY"] or signed_by(values["SOURCESENTRY"])
        place = (suites.index(suite), suite, values["REPO_URI"], key)
        parts_of.setdefault(place, set()).add(values["COMPONENT"])
    # Updates and security fixes alone make no base: their suites have only what changed since the release.
    if not any(suite == suites[0] for _, suite, _, _ in parts_of):
        return ()
    lines = []
    for (_, suite, uri, key), components in sorted(parts_of.items()):
        option = f"[signed-by={key}] " if key.startswith("/") else ""
        ordered = [name for name in base.archive.components if name in components]
        lines.append(f"deb {option}{uri} {suite} {' '.join(ordered)}")
    return tuple(lines)


def signed_by(entry: str) -> str:
    """The keyring file of a source, read from its place ``file:number``; empty when it names none.

    apt prints the keyring among its index targets only since 2.9. The number counts lines in a .list file and
    stanzas in a .sources file (sources.list(5)).
    """
    file, _, number = entry.rpartition(":")
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        if file.endswith(".sources"):
            parts = [part for part in re.split(r"\n\s*\n", text) if re.search(r"^[^#\s]", part, re.MULTILINE)]
            match = re.search(r"^signed-by:\s*(/\S+)", parts[int(number) - 1], re.MULTILINE | re.IGNORECASE)
        else:
            match = re.search(r"\[[^]]*signed-by=(/[^]\s]+)", text.splitlines()[int(number) - 1])
    except (OSError, ValueError, IndexError):
        return ""
    return match[1] if match else ""


def _values(line: str) -> dict[str, str] | None:
    parts = line.split("\t")
    if len(parts) != len(_FIELDS):
        return None  # a warning of apt
    return {field: "" if value == f"$({field})" else value for field, value in zip(_FIELDS, parts, strict=True)}


def _known(base: Base, listed: Iterable[str]) -> str:
    all_values = [values for line in listed if (values := _values(line))]
    seen = sorted({f"{values['RELEASE']}/{values['COMPONENT']}" for values in all_values})
    needed = f"{base.archive.suite} with {', '.join(base.archive.components)}"
    return f"Needed: {needed}. The machine's sources have: {', '.join(seen) or 'nothing (run apt-get update?)'}."


def access(dumped: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """From ``apt-config dump``: the settings for reaching repositories, and the proxies as environment variables.

    A proxy's URL may hold a password, so it goes by the environment and not by a command line, which a log shows.
    """
    options, proxies = [], {}
    for line in dumped.splitlines():
        name, _, rest = line.partition(" ")
        value = rest.rstrip(";").strip('"')
        if name in _PROXIES and value not in ("", "DIRECT"):
            proxies[_PROXIES[name]] = value
        elif name in _CREDENTIALS and value:
            options.append(f'{name} "{value if value.startswith("/") else f"/etc/apt/{value}"}"')
        elif _ACCESS.match(name):
            options.append(f'{name} "{value}"')
    return tuple(options), proxies
