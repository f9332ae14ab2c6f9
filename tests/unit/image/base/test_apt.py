"""apt: which sources of a machine belong to a base, and what of its settings goes along."""

import pytest

from envbuild.catalog.catalog import Catalog, HostDistribution
from envbuild.catalog.data import data_root
from envbuild.image.base import apt

CATALOG = Catalog.open(data_root())
DEBIAN = CATALOG.base("debian12")
UBUNTU = CATALOG.base("ubuntu2404")


TRIXIE = CATALOG.base("debian13-cu130")


def target(uri, release, component, codename="$(CODENAME)", origin="$(ORIGIN)", signed_by="$(SIGNED_BY)"):
    return f"{uri}\t{release}\t{codename}\t{origin}\t{component}\t{signed_by}\t$(SOURCESENTRY)"


OWN = target("http://m/debian/", "bookworm", "main")
OWN_LINE = "deb http://m/debian/ bookworm main"


@pytest.mark.parametrize(
    ("base", "listed", "lines"),
    [
        pytest.param(
            DEBIAN,
            [
                target("http://s/debian-security/", "bookworm-security", "main"),
                target("http://m/debian/", "bookworm-updates", "main"),
                OWN,
            ],
            (
                OWN_LINE,
                "deb http://m/debian/ bookworm-updates main",
                "deb http://s/debian-security/ bookworm-security main",
            ),
            id="release, updates, security",
        ),
        pytest.param(DEBIAN, [target("http://m/debian/", "bookworm-security", "main")], (), id="no release"),
        pytest.param(
            UBUNTU,
            [target("http://m/u/", "noble", "universe"), target("http://m/u/", "noble", "main")] * 2,
            ("deb http://m/u/ noble main universe",),
            id="components in the order of the base",
        ),
        pytest.param(
            DEBIAN, [target("http://m/debian/", "stable", "main", codename="bookworm")], (OWN_LINE,), id="codename"
        ),
        pytest.param(
            DEBIAN,
            [target("http://m/debian/", "bookworm", "main", signed_by="/usr/share/keyrings/k.gpg")],
            ("deb [signed-by=/usr/share/keyrings/k.gpg] http://m/debian/ bookworm main",),
            id="keyring",
        ),
        pytest.param(
            DEBIAN,
            [target("http://m/debian/", "bookworm", "main", signed_by="ABCDEF01")],
            (OWN_LINE,),
            id="fingerprint",
        ),
        pytest.param(
            TRIXIE,
            [
                target("http://m/debian/", "bookworm", "main", origin="Debian", signed_by="/usr/share/keyrings/k.gpg"),
                target("http://m/debian/", "bookworm-backports", "main", origin="Debian"),
                target("http://s/debian-security/", "bookworm-security", "main", origin="Debian"),
                target("http://d/docker/", "bookworm", "main", origin="Docker"),
            ],
            (
                "deb [signed-by=/usr/share/keyrings/k.gpg] http://m/debian/ trixie main",
                "deb http://s/debian-security/ trixie-security main",
            ),
            id="another release of the machine's distribution",
        ),
        pytest.param(UBUNTU, [target("http://m/debian/", "bookworm", "main", origin="Debian")], (), id="another one"),
        *(
            (DEBIAN, [other, OWN], (OWN_LINE,))
            for other in (
                target("http://m/debian/", "bookworm-backports", "main"),
                target("http://m/debian/", "trixie", "main"),
                target("http://m/debian/", "bookworm", "non-free"),
                target("cdrom:[Debian]/", "bookworm", "main"),
                "W: some warning of apt",
            )
        ),
    ],
)
def test_sources_of_the_machine_that_belong_to_a_base(base, listed, lines):
    assert apt.lines_for(base, listed) == lines


SOURCES = """# a comment

Types: deb
# another
URIs: http://m/debian
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/first.gpg

Types: deb
URIs: http://m/other
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://m/third
Suites: bookworm
Components: main
signed-by: /usr/share/keyrings/third.gpg
"""


@pytest.mark.parametrize(
    ("number", "keyring"),
    [("1", "/usr/share/keyrings/first.gpg"), ("2", ""), ("3", "/usr/share/keyrings/third.gpg"), ("9", ""), ("x", "")],
)
def test_signed_by_is_read_from_a_deb822_stanza(tmp_path, number, keyring):
    file = tmp_path / "some.sources"
    file.write_text(SOURCES)
    assert apt.signed_by(f"{file}:{number}") == keyring


def test_signed_by_is_read_from_a_one_line_source(tmp_path):
    file = tmp_path / "some.list"
    file.write_text("# first\ndeb [arch=amd64 signed-by=/etc/apt/keyrings/a.gpg] http://m/debian bookworm main\n")
    assert apt.signed_by(f"{file}:2") == "/etc/apt/keyrings/a.gpg"
    assert apt.signed_by(f"{file}:1") == ""


def test_signed_by_of_a_source_that_cannot_be_read_is_empty():
    assert apt.signed_by("$(SOURCESENTRY)") == ""
    assert apt.signed_by("/nonexistent/x.list:1") == ""


@pytest.mark.parametrize(
    ("base", "mirror", "lines"),
    [
        (DEBIAN, "http://m/d", ("deb http://m/d bookworm main", "deb http://m/d bookworm-updates main")),
        (
            UBUNTU,
            "http://m/u",
            tuple(f"deb http://m/u noble{suite} main universe" for suite in ("", "-updates", "-security")),
        ),
        (DEBIAN, "deb file:/srv ./\ndeb http://m/d x main\n", ("deb file:/srv ./", "deb http://m/d x main")),
    ],
)
def test_mirror_has_the_suites_that_its_distribution_keeps_there(base, mirror, lines):
    assert apt.mirror_lines(base, mirror) == lines


@pytest.mark.parametrize(("machine", "there", "option"), [
    ("ubuntu", True, "[signed-by={}] "),
    # A site's mirror may be signed by a key that its machines trust.
    ("ubuntu", False, ""),
    ("debian", True, ""),
])  # fmt: skip
def test_mirror_of_another_distribution_is_checked_by_that_ones_keys(monkeypatch, tmp_path, machine, there, option):
    file = tmp_path / "debian.gpg"
    if there:
        file.touch()
    monkeypatch.setitem(apt.KEYRINGS, "debian", apt.Keyring(file, "debian-archive-keyring"))
    monkeypatch.setattr(HostDistribution, "here", lambda: HostDistribution(machine, "1"))
    lines = apt.mirror_lines(DEBIAN, "http://m/d")
    assert lines[0] == f"deb {option.format(file)}http://m/d bookworm main"
    assert ("apt-get install" in apt.keyring_help(DEBIAN)) is not there


def test_access_keeps_how_repositories_are_reached_and_nothing_else():
    """A proxy with its password goes to the environment, not to a command line."""
    options, proxies = apt.access(
        'APT::Install-Recommends "1";\n'
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::http::Proxy::internal.example "DIRECT";\n'
        'Acquire::http::Proxy "http://user:pw@proxy:3128";\nAcquire::https::Proxy "DIRECT";\n'
        'DPkg::Pre-Install-Pkgs:: "/usr/sbin/hook";\n'
        'Dir::Etc::netrc "auth.conf";\nDir::Etc::netrcparts "/srv/auth.d";\n'
    )
    assert options == (
        'Acquire::Check-Valid-Until "false"',
        'Acquire::http::Proxy::internal.example "DIRECT"',
        'Dir::Etc::netrc "/etc/apt/auth.conf"',
        'Dir::Etc::netrcparts "/srv/auth.d"',
    )
    assert proxies == {"http_proxy": "http://user:pw@proxy:3128"}
