"""Which machines can verify a lock of a base."""

import pytest
from helpers.stack_files import write_base

from envbuild.catalog.catalog import Catalog
from envbuild.core.errors import MachineError
from envbuild.sync import machine as this_machine
from envbuild.sync.verify import Verifier


@pytest.fixture
def base(tmp_path):
    write_base(tmp_path, glibc="2.36")
    return Catalog.open(tmp_path).base("small")


@pytest.fixture
def on(monkeypatch):
    """Be on a machine of this architecture and glibc."""

    def machine(name, glibc):
        monkeypatch.setattr(this_machine.platform, "machine", lambda: name)
        monkeypatch.setattr(this_machine.platform, "libc_ver", lambda: ("glibc", glibc))

    return machine


@pytest.mark.parametrize(
    ("machine", "glibc", "why"),
    [
        ("x86_64", "2.36", ""),
        ("x86_64", "2.39", ""),
        ("x86_64", "2.100", ""),
        ("x86_64", "3.0", ""),
        ("x86_64", "2.35", "this machine has 2.35"),
        ("x86_64", "2.9", "this machine has 2.9"),
        ("x86_64", "", "this machine has none"),
        ("aarch64", "2.39", "this machine is aarch64"),
    ],
)
def test_machine_is_refused_for_its_architecture_or_an_older_glibc(base, machine, glibc, why, on):
    on(machine, glibc)
    found = ""
    try:
        Verifier.require_machine(base)
    except MachineError as error:
        found = error.why
        assert "envbuild image" in error.fix
    assert (bool(found), why in found) == (bool(why), True)
