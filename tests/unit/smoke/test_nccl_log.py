"""The transports that NCCL's log names."""

from __future__ import annotations

from envbuild_smoke.drivers.nccl_log import transports_in

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
