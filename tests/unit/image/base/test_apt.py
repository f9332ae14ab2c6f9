"""apt: which sources of a machine belong to a base, and what of its settings goes along."""

import pytest

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.image.base import apt

CATALOG = Catalog.open(data_root())
DEBIAN = CATALOG.base("debian12")
UBUNTU = CATALOG.base("ubuntu2404")


def target(uri, release, component, codename="$(CODENAME)", signed_by="$(SIGNED_BY)", entry="$(SOURCESENTRY)"):
    return f"{uri}\t{release}\t{codename}\t{component}\t{signed_by}\t{entry}"


def test_lines_take_release_updates_and_security_in_that_order():
    listed = [
        target("http://s/debian-security/", "bookworm-security", "main"),
        target("http://m/debian/", "bookworm-updates", "main"),
        target("http://m/debian/", "bookworm", "main"),
    ]
    assert apt.lines_for(DEBIAN, listed) == (
        "deb http://m/debian/ bookworm main",
        "deb http://m/debian/ bookworm-updates main",
        "deb http://s/debian-security/ bookworm-security main",
    )


@pytest.mark.parametrize(
    "other",
    [
        target("http://m/debian/", "bookworm-backports", "main"),
        target("http://m/debian/", "trixie", "main"),
        target("http://m/debian/", "bookworm", "non-free"),
        target("https://vendor/apt", "cloud-sdk-bookworm", "main"),
        target("cdrom:[Debian]/", "bookworm", "main"),
        "W: some warning of apt",
        "",
    ],
)
def test_lines_leave_out_what_does_not_belong_to_the_base(other):
    own = target("http://m/debian/", "bookworm", "main")
    assert apt.lines_for(DEBIAN, [other, own]) == ("deb http://m/debian/ bookworm main",)


def test_lines_need_the_release_itself():
    assert apt.lines_for(DEBIAN, [target("http://m/debian/", "bookworm-security", "main")]) == ()


def test_lines_keep_the_components_of_a_source_in_the_order_of_the_base():
    listed = [target("http://m/u/", "noble", "universe"), target("http://m/u/", "noble", "main")] * 2
    assert apt.lines_for(UBUNTU, listed) == ("deb http://m/u/ noble main universe",)


def test_lines_know_a_release_by_its_codename():
    listed = [target("http://m/debian/", "stable", "main", codename="bookworm")]
    assert apt.lines_for(DEBIAN, listed) == ("deb http://m/debian/ bookworm main",)


def test_lines_name_the_keyring_that_apt_tells():
    listed = [target("http://m/debian/", "bookworm", "main", signed_by="/usr/share/keyrings/k.gpg")]
    assert apt.lines_for(DEBIAN, listed) == (
        "deb [signed-by=/usr/share/keyrings/k.gpg] http://m/debian/ bookworm main",
    )


def test_lines_do_not_take_a_fingerprint_for_a_file():
    listed = [target("http://m/debian/", "bookworm", "main", signed_by="ABCDEF0123456789")]
    assert apt.lines_for(DEBIAN, listed) == ("deb http://m/debian/ bookworm main",)


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


def test_mirror_of_debian_has_no_security_archive():
    assert apt.mirror_lines(DEBIAN, "http://m/debian") == (
        "deb http://m/debian bookworm main",
        "deb http://m/debian bookworm-updates main",
    )


def test_mirror_of_ubuntu_has_the_security_suite():
    assert apt.mirror_lines(UBUNTU, "http://m/ubuntu") == (
        "deb http://m/ubuntu noble main universe",
        "deb http://m/ubuntu noble-updates main universe",
        "deb http://m/ubuntu noble-security main universe",
    )


def test_mirror_may_be_whole_sources():
    text = "deb [trusted=yes] file:/srv/debs ./\ndeb http://m/debian bookworm main\n"
    assert apt.mirror_lines(DEBIAN, text) == (
        "deb [trusted=yes] file:/srv/debs ./",
        "deb http://m/debian bookworm main",
    )


def test_access_keeps_how_repositories_are_reached_and_nothing_else():
    options, proxies = apt.access(
        'APT::Install-Recommends "1";\n'
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::https::CaInfo "/etc/ssl/site.pem";\n'
        'Acquire::http::Proxy::internal.example "DIRECT";\n'
        'DPkg::Pre-Install-Pkgs:: "/usr/sbin/hook";\n'
        'Acquire::Languages "de";\n'
    )
    assert options == (
        'Acquire::Check-Valid-Until "false"',
        'Acquire::https::CaInfo "/etc/ssl/site.pem"',
        'Acquire::http::Proxy::internal.example "DIRECT"',
    )
    assert proxies == {}


def test_access_hands_a_proxy_with_its_password_to_the_environment():
    options, proxies = apt.access(
        'Acquire::http::Proxy "http://user:pw@proxy:3128";\nAcquire::https::Proxy "DIRECT";\n'
    )
    assert options == ()
    assert proxies == {"http_proxy": "http://user:pw@proxy:3128"}


def test_access_names_credentials_by_absolute_path():
    options, _ = apt.access('Dir::Etc::netrc "auth.conf";\nDir::Etc::netrcparts "/srv/auth.d";\n')
    assert options == ('Dir::Etc::netrc "/etc/apt/auth.conf"', 'Dir::Etc::netrcparts "/srv/auth.d"')
