"""Metadata of packages: versions, licences, origin."""

import pytest

from envbuild.image.scan.packages import (
    debian_files,
    debian_packages,
    from_elsewhere,
    merged_usr,
    python_package,
)

STATUS = b"""\
Package: su-tools
Status: install ok installed
Architecture: amd64
Source: shadow (1:4.13)
Version: 1:4.13+b1
Description: tools
 more words

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: held
Status: hold ok installed
Architecture: all
Version: 2
"""
COPYRIGHT = b"""\
Format: packaging-manuals/copyright-format/1.0/
Files: *
License: GPL-2+
Files: x
License: Expat
"""


def metadata(*lines):
    return {"METADATA": "\n".join(["Name: Some.Thing", "Version: 1.0", *lines, "", "License: not a field"]).encode()}


@pytest.mark.parametrize(
    ("lines", "licence", "text"),
    [
        (["License-Expression: MIT or apache-2.0"], "MIT OR Apache-2.0", ""),
        (["License: BSD-3-Clause"], "BSD-3-Clause", ""),
        (["License: BSD"], "", "BSD"),
        (["License: Apache 2.0", "Classifier: License :: OSI Approved :: Apache Software License"], "Apache-2.0", ""),
        (["Classifier: License :: OSI Approved :: BSD License"], "", ""),
        (["License: " + "long " * 30], "", ""),
        (["License: UNKNOWN"], "", ""),
        ([], "", ""),
    ],
)
def test_licence_is_an_spdx_expression_or_the_authors_words(lines, licence, text):
    found = python_package("x.dist-info", metadata(*lines))
    assert (found.licence, found.licence_text) == (licence, text)


def test_package_has_its_canonical_name_and_nothing_without_one():
    assert python_package("x.dist-info", metadata()).name == "some-thing"
    assert python_package("x.dist-info", {}) is None


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("", False),
        ('{"url": "https://x/y.whl", "archive_info": {"hash": "sha256=1"}}', False),
        ('{"url": "https://x/y.git", "vcs_info": {"vcs": "git"}}', True),
        ('{"url": "file:///x", "dir_info": {}}', True),
        ("{", True),
    ],
)
def test_repositories_and_folders_vouch_for_nothing(origin, expected):
    assert from_elsewhere(origin) is expected


def test_debian_packages_are_the_installed_ones_with_source_and_licences():
    held, tools = debian_packages(
        STATUS, {"su-tools": COPYRIGHT, "held": b"Copyright 1999 somebody\nLicense: no format"}
    )
    assert (tools.name, tools.version, tools.architecture) == ("su-tools", "1:4.13+b1", "amd64")
    assert (tools.source, tools.source_version, tools.licences) == ("shadow", "1:4.13", ("Expat", "GPL-2+"))
    assert (held.name, held.source, held.source_version, held.licences) == ("held", "held", "2", ())


def test_lists_name_files_where_they_are_after_the_merge_of_usr():
    assert debian_files({"x.list": b"/.\n/bin/su\n/usr/bin/y\n", "x.md5sums": b"0  z\n"}) >= {"usr/bin/su", "usr/bin/y"}
    assert [merged_usr(path) for path in ("lib64/a", "usr/lib/a", "etc/a", "binary")] == [
        "usr/lib64/a", "usr/lib/a", "etc/a", "binary"
    ]  # fmt: skip
