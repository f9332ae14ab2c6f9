"""NCCL's own log: which transports connect the ranks, and how it chose its network."""

import re

# "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "via SHM/direct/direct", "[send] via NET/Socket/0", and of plugins
# "[send] via NET/AWS Libfabric/0/GDRDMA/Shared", "via NET/IBext/0(8)/GDRDMA" (src/transport/net.cc). A network's
# name ends before the number of its device.
_VIA = re.compile(r"\bvia ((?:NET|COLLNET)/[^/]+(?=/\d)|(?:P2P|SHM|NVLS)(?:/[A-Za-z_]+)*)")
# "NET/Plugin: Could not find: libnccl-net.so", "NET/IB : No device found.", "NCCL_IB_DISABLE set by environment to 1.",
# "Failed to open libibverbs.so", "Using network Socket" (src/plugin/net.cc, src/transport/net_ib/init.cc, src/init.cc).
_CHOICE = re.compile(
    r"NCCL (?:INFO|WARN) ("
    r"(?:Using|Initializing) network .*|NET/(?:Plugin|IB|Socket|gIB|FasTrak|OFI)\b.*|.*\bNET plugin .*"
    r"|NCCL_(?:IB|NET|SOCKET|IBEXT)_?\w* set (?:by environment )?to .*|.*(?:libibverbs|libnccl-net|libnccl-fastrak).*)"
)
MOST_LINES, MOST_CHARACTERS = 20, 200


def transports_in(nccl_log: str) -> list[str]:
    """Return the transports that the log names, sorted, each once."""
    return sorted(set(_VIA.findall(nccl_log)))


def network_lines_in(nccl_log: str) -> list[str]:
    """Return what the log says about how NCCL chose its network, each line once, without who wrote it."""
    return [line[:MOST_CHARACTERS] for line in dict.fromkeys(_CHOICE.findall(nccl_log))][:MOST_LINES]
