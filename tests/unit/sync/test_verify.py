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


@pytest.mark.parametrize("glibc", ["2.36", "2.39", "2.100", "3.0"])
def test_machine_with_the_bases_glibc_or_newer_is_accepted(base, glibc, on):
    on("x86_64", glibc)
    Verifier.require_machine(base)


@pytest.mark.parametrize(
    ("machine", "glibc", "why"),
    [
        ("x86_64", "2.35", "this machine has 2.35"),
        ("x86_64", "2.9", "this machine has 2.9"),
        ("x86_64", "", "this machine has none"),
        ("aarch64", "2.39", "this machine is aarch64"),
    ],
)
def test_other_machine_is_refused_with_a_way_out(base, machine, glibc, why, on):
    on(machine, glibc)
    with pytest.raises(MachineError) as caught:
        Verifier.require_machine(base)
    assert why in caught.value.why
    assert "envbuild image" in caught.value.fix
