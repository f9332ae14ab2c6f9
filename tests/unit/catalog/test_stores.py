"""Which remote stores are in force: the file's, the variables', the command line's."""

from pathlib import Path

import pytest

from envbuild.catalog.site import load_site
from envbuild.catalog.stores import Store, choose_stores
from envbuild.core.errors import ConfigurationError

FILE = """\
[stores.central]
url = "oci://registry.example.org/team/wheels"
[stores.ours]
url = "s3://bucket/wheels/"
mode = "read-write"
endpoint = "http://127.0.0.1:9000"
"""


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    (tmp_path / "config.toml").write_text(FILE)
    return {"HOME": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null", "ENVBUILD_CONFIG": str(tmp_path / "config.toml")}


def rows(stores: tuple[Store, ...]) -> list[tuple[str, str, str]]:
    return [(entry.name, entry.url, entry.mode.value) for entry in stores]


CENTRAL = ("central", "oci://registry.example.org/team/wheels", "read")
OURS = ("ours", "s3://bucket/wheels", "read-write")


def test_without_settings_there_are_no_stores(tmp_path):
    site = load_site({"HOME": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"})
    assert (site.stores, site.known_stores) == ((), {})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [CENTRAL, OURS]),
        ({"ENVBUILD_STORE": ""}, [CENTRAL, OURS]),
        ({"ENVBUILD_STORE": "off"}, []),
        ({"ENVBUILD_STORE": "ours"}, [OURS]),
        ({"ENVBUILD_STORE": "s3://bucket/wheels"}, [OURS]),
        ({"ENVBUILD_STORE": "file:///shared"}, [("file:///shared", "file:///shared", "read")]),
        ({"ENVBUILD_STORE": "ours", "ENVBUILD_STORE_MODE": "write"}, [(*OURS[:2], "write")]),
        ({"ENVBUILD_STORE_MODE": "read"}, [CENTRAL, (*OURS[:2], "read")]),
        (
            {"ENVBUILD_STORE": "gs://bucket", "ENVBUILD_STORE_MODE": "read-write"},
            [("gs://bucket", "gs://bucket", "read-write")],
        ),
    ],
)
def test_variables_win_over_the_file(environ, variables, expected):
    site = load_site({**environ, **variables})
    assert rows(site.stores) == expected
    assert set(site.known_stores) == {"central", "ours"}


def test_an_endpoint_goes_with_its_store(environ):
    assert [entry.endpoint for entry in load_site(environ).stores] == [None, "http://127.0.0.1:9000"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ENVBUILD_STORE": "their"}, "there is no store 'their'"),
        ({"ENVBUILD_STORE": "http://host/x"}, "is not the address of a store"),
        ({"ENVBUILD_STORE": "s3://me:secret@bucket"}, "holds a user name or password"),
        ({"ENVBUILD_STORE": "file:///tmp/a%20b"}, "cannot be the address of a store"),
        ({"ENVBUILD_STORE_MODE": "rw"}, "'rw' is not a mode of a store"),
    ],
)
def test_wrong_variables_are_configuration_errors(environ, variables, expected):
    with pytest.raises(ConfigurationError) as refused:
        load_site({**environ, **variables})
    assert expected in refused.value.what
    assert "secret" not in str(refused.value.as_json())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[stores.a]\nurl = "ftp://x"\n', "begins with none of"),
        ('[stores.a]\nurl = "oci://me:secret@host/x"\n', "holds a user name or password"),
        ('[stores.a]\nurl = "s3://bucket"\nmode = "rw"\n', "'read', 'write' or 'read-write'"),
        ('[stores.a]\nmode = "read"\n', "required and missing"),
        ('[stores.a]\nurl = "s3://bucket"\nkey = "x"\n', "unknown key"),
        ('[stores.A]\nurl = "s3://bucket"\n', "must match"),
        ('[stores.a]\nurl = "s3://bucket"\nendpoint = "host:9000"\n', "must match"),
        ('[stores.a]\nurl = "s3://bucket"\nendpoint = "http://me:secret@host"\n', "no password"),
    ],
)
def test_a_wrong_file_names_line_and_key(environ, text, expected):
    Path(environ["ENVBUILD_CONFIG"]).write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        load_site(environ)
    assert expected in refused.value.why
    assert "secret" not in str(refused.value.as_json())


def test_the_command_line_names_one(environ):
    known = load_site(environ).known_stores
    assert rows(choose_stores(known, "ours", "read", "--store")) == [(*OURS[:2], "read")]
    with pytest.raises(ConfigurationError, match="there is no store 'x'") as refused:
        choose_stores(known, "x", "", "--store")
    assert "--store names it" in refused.value.why
    assert "central, ours" in refused.value.why
