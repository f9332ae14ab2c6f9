"""The packages in a layer, from the metadata in dist-info folders and in dpkg's files."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterator, Mapping
from email.parser import HeaderParser
from pathlib import PurePosixPath
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name
from pydantic import Field

from envbuild.catalog.fields import TomlModel
from envbuild.core import jsonread

DPKG_STATUS = "var/lib/dpkg/status"
DPKG_INFO = "var/lib/dpkg/info/"
COPYRIGHT = re.compile(r"^usr/share/doc/(?P<package>[^/]+)/copyright$")
DIST_INFO = re.compile(r"(?P<folder>(?:.*/)?[^/]+\.dist-info)/(?P<file>METADATA|RECORD|direct_url\.json)$")
# Longer ones are the licence's text.
LICENCE_NAME = 100
# Classifiers that mean one licence (PEP 639 calls the others ambiguous: "BSD License" is any of them).
CLASSIFIERS = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: The Unlicense (Unlicense)": "Unlicense",
    "License :: OSI Approved :: GNU General Public License v2 or later (GPLv2+)": "GPL-2.0-or-later",
    "License :: OSI Approved :: GNU General Public License v3 or later (GPLv3+)": "GPL-3.0-or-later",
    "License :: OSI Approved :: GNU Lesser General Public License v3 or later (LGPLv3+)": "LGPL-3.0-or-later",
}


class PythonPackage(TomlModel):
    """An installed distribution.

    Attributes:
        licence: an SPDX expression; ``licence_text``: the author's text where it is not one.
    """

    name: str
    version: str
    folder: str = Field(description="its dist-info folder")
    licence: str = ""
    licence_text: str = ""
    origin: str = Field(default="", description="direct_url.json, where it did not come from an index by name")


class DebianPackage(TomlModel):
    """An installed Debian package; its licences under the short names of its copyright file."""

    name: str
    version: str
    architecture: str = ""
    source: str = ""
    source_version: str = ""
    licences: tuple[str, ...] = ()


def python_package(folder: str, files: Mapping[str, bytes]) -> PythonPackage | None:
    """The distribution of a dist-info folder; None where it has no readable METADATA."""
    # Metadata has the form of mail headers (core metadata specification); the body is the description.
    fields = HeaderParser().parsestr(files.get("METADATA", b"").decode(errors="replace"))
    name, version = str(fields.get("Name", "")).strip(), str(fields.get("Version", "")).strip()
    if not name or not version:
        return None
    expression, text = _licence(
        str(fields.get("License-Expression", "")),
        str(fields.get("License", "")),
        [str(classifier) for classifier in fields.get_all("Classifier", [])],
    )
    return PythonPackage(
        name=canonicalize_name(name),
        version=version,
        folder=folder,
        licence=expression,
        licence_text=text,
        origin=files.get("direct_url.json", b"").decode(errors="replace"),
    )


def _licence(expression: str, text: str, classifiers: list[str]) -> tuple[str, str]:
    """An SPDX expression, or else the author's text."""
    for candidate in (expression, text):
        with contextlib.suppress(InvalidLicenseExpression):
            return str(canonicalize_license_expression(candidate)), ""
    # The field License was any text before PEP 639, often that of the licence, and setuptools wrote UNKNOWN for none.
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    licences = sorted({CLASSIFIERS[classifier] for classifier in classifiers if classifier in CLASSIFIERS})
    if len(licences) == 1:
        return licences[0], ""
    return "", first if 0 < len(first) <= LICENCE_NAME and first.upper() != "UNKNOWN" else ""


def recorded(record: bytes) -> Iterator[tuple[str, str]]:
    """Path and sha256 (URL-safe base64, as it stands there) of each file of a RECORD (PEP 376)."""
    for row in csv.reader(io.StringIO(record.decode(errors="replace"))):
        if row:
            yield row[0], row[1].removeprefix("sha256=") if len(row) > 1 else ""


def from_elsewhere(origin: str) -> bool:
    """Whether the origin in a direct_url.json is a repository or a folder, and not an archive."""
    try:
        value: Any = jsonread.foreign(origin) if origin else {}
    except ValueError:
        return True
    return isinstance(value, dict) and ("vcs_info" in value or "dir_info" in value)


def debian_packages(status: bytes, copyrights: Mapping[str, bytes]) -> tuple[DebianPackage, ...]:
    """The installed packages of dpkg's status file."""
    packages = []
    for paragraph in status.decode(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Status|Architecture|Source): (.*)$", paragraph, re.MULTILINE))
        # Three words, want, flag and status (dpkg-query(1)): a removed package may keep a paragraph, "deinstall ok
        # config-files".
        if fields.get("Status", "").split()[-1:] != ["installed"] or "Package" not in fields:
            continue
        name, version = fields["Package"], fields.get("Version", "")
        # deb-control(5): left out where it is the package's own name; a version in brackets only where it differs.
        source, _, source_version = str(fields.get("Source") or name).partition(" ")
        packages.append(
            DebianPackage(
                name=name,
                version=version,
                architecture=fields.get("Architecture", ""),
                source=source,
                source_version=source_version.strip("()") or version,
                licences=_debian_licences(copyrights.get(name, b"")),
            )
        )
    return tuple(sorted(packages, key=lambda package: (package.name, package.architecture)))


def _debian_licences(text: bytes) -> tuple[str, ...]:
    """The licences of a machine-readable copyright file (Debian's format 1.0); of others nothing is known."""
    words = text.decode(errors="replace")
    if not re.match(r"^\s*Format:.*copyright-format", words, re.IGNORECASE):
        return ()
    names = re.findall(r"^License:[ \t]*(\S.*)$", words, re.MULTILINE)
    return tuple(sorted({name.strip() for name in names if len(name.strip()) <= LICENCE_NAME}))


def debian_files(lists: Mapping[str, bytes]) -> set[str]:
    """Every path of dpkg's lists (``NAME.list``), where it is after the merge of /bin, /lib and /sbin into /usr."""
    paths = set()
    for name, content in lists.items():
        if name.endswith(".list"):
            paths |= {merged_usr(line.lstrip("/")) for line in content.decode("utf-8", "surrogateescape").splitlines()}
    return paths


def debian_digests(lists: Mapping[str, bytes]) -> dict[str, str]:
    """The MD5 digests of files by path that dpkg keeps (``NAME.md5sums``)."""
    digests = {}
    for name, content in lists.items():
        if name.endswith(".md5sums"):
            for line in content.decode("utf-8", "surrogateescape").splitlines():
                digest, _, path = line.partition("  ")
                digests[merged_usr(path.removeprefix("./"))] = digest
    return digests


def merged_usr(path: str) -> str:
    """``bin/su`` as ``usr/bin/su``: packages name the one, images have the other."""
    first = PurePosixPath(path).parts[:1]
    return f"usr/{path}" if first and first[0] in ("bin", "sbin", "lib", "lib32", "lib64", "libx32") else path
