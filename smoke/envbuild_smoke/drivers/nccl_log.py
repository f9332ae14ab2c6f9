"""NCCL's own log: which transports connect the ranks."""

import re

# "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "[send] via NET/Socket/0", "via SHM/direct/direct". The number of
# the network device is left out.
_VIA = re.compile(r"\bvia ((?:P2P|SHM|NET|COLLNET|NVLS)(?:/[A-Za-z_]+)*)")


def transports_in(nccl_log: str) -> list[str]:
    """Return the transports that the log names, sorted, each once."""
    return sorted(set(_VIA.findall(nccl_log)))
