"""The transports that NCCL's log names."""

from __future__ import annotations

import pytest

from envbuild_smoke.drivers.nccl_log import network_lines_in, transports_in

LOG = """\
node:71:90 [0] NCCL INFO NET/IB : No device found.
node:71:90 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node:71:90 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node:71:91 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
node:71:91 [0] NCCL INFO Channel 01/0 : 2[0] -> 1[1] [receive] via NET/IB/3/GDRDMA
node:71:91 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[1] via SHM/direct/direct
"""


def test_transports_are_those_used_each_once() -> None:
    """A network that is found and not used does not count."""
    assert transports_in(LOG) == ["NET/IB", "NET/Socket", "P2P/CUMEM/read", "SHM/direct/direct"]
    assert transports_in("\n".join(LOG.splitlines()[:2])) == []


@pytest.mark.parametrize(
    ("via", "name"),
    [
        # aws/aws-ofi-nccl#715
        ("Channel 04/1 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA/Shared", "NET/AWS Libfabric"),
        # NVIDIA's images, which have HPC-X
        ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/IBext_v8/0/GDRDMA", "NET/IBext_v8"),
        ("Channel 00/0 : 15[7] -> 0[0] [send] via NET/IBext/0(8)/GDRDMA", "NET/IBext"),
        ("Channel 03/0 : 2[2] -> 11[3] [send] via NET/gIB/3/GDRDMA", "NET/gIB"),
        ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer/read", "P2P/direct"),
    ],
)
def test_names_of_plugins(via: str, name: str) -> None:
    assert transports_in(f"host-1:71:90 [0] NCCL INFO {via}\n") == [name]


def test_how_the_network_was_chosen() -> None:
    log = """\
n:14159:14159 [0] NCCL INFO Bootstrap : Using enp24s0np0:10.10.10.1<0>
n:14159:14159 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
n:14159:14159 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
n:14160:14160 [1] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
n:14159:14159 [0] NCCL INFO Using network Socket
n:14159:14159 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
    assert network_lines_in(log) == [
        "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
        "NCCL_IB_DISABLE set by environment to 1.",
        "Using network Socket",
    ]
