"""Compares the network between GPUs with what the plan asks for, and names the nodes that are bad.

The cluster's file says which network NCCL's own log has to name, and how fast it is. Another one fails at any speed: it
works, four to five times slower (NVIDIA/nccl#352, #1925).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from envbuild.certify.judge.results import Results
from envbuild.certify.models import Check, Problem
from envbuild_smoke.network.limits import NCCL, floors_of, outcomes_of, shortfalls
from envbuild_smoke.network.rounds import Group, bad_nodes, next_round
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.results import BandwidthLine, Machine

SOCKET, SHARED_MEMORY = "NET/Socket", "SHM"
# GPUs that are on a board with NVLink between them: nvidia-smi calls those with PCIe alone "... PCIe" or "... NVL".
_WITH_NVLINK = re.compile(r"SXM|HBM3$|NVIDIA G?[BH][23]00$")
# What Slurm takes as the name of a node, and a shell as a word.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
MOST_NAMED = 4
# What NCCL has itself; the others are plugins.
_BUILT_IN = ("NET/IB", SOCKET)
_NO_PLUGIN = r"Could not find: |[Nn]o plugin found|cannot open shared object|Plugin load .* returned"
# Lines of NCCL's log (src/plugin/net.cc, src/transport/net_ib/init.cc, src/misc/ibvsymbols.cc, src/misc/param.cc) and
# variables: the cause that each shows, of a network that is built in or of a plugin.
_CAUSES: Sequence[tuple[str, str, bool | None]] = (
    (r"NCCL_NET(=| set by environment to )Socket", "NCCL_NET asks for sockets", None),
    (r"NCCL_IB_DISABLE(=| set by environment to )1", "NCCL_IB_DISABLE is set", True),
    (r"[Ff]ailed to open libibverbs|libibverbs.* cannot open", "libibverbs is not in the image", True),
    (
        r"NET/IB : No device found",
        "NCCL sees no device: /dev/infiniband is not in the job, or NCCL_IB_HCA names others",
        True,
    ),
    (_NO_PLUGIN, "NCCL found no plugin: its folder is not mounted, or LD_LIBRARY_PATH in the job lacks it", False),
    (r"[Ff]ailed to initialize", "the plugin did not start: its devices or its daemon are not in the job", False),
)
_USUAL = {
    True: "usual causes: NCCL_IB_DISABLE, no /dev/infiniband in the job, no libibverbs in the image",
    False: "usual causes: the plugin's folder is not mounted, its script was not sourced, or the image's own variables "
    "won (--container-env)",
}


@dataclass(frozen=True)
class BadNode:
    """A node that is bad whatever its partner; `host` is what Slurm calls it, None where that is unknown."""

    node: int
    host: str | None
    reason: str

    @property
    def drain(self) -> str | None:
        """The command that takes it out of use, for people to run."""
        # Results are foreign text, and people paste this.
        if self.host is None or not _HOST.fullmatch(self.host):
            return None
        return f'scontrol update NodeName={self.host} State=DRAIN Reason="envbuild: {self.reason}"'


def network_problems(plan: Plan, results: Results) -> list[Problem]:
    """Where the network is slower than a floor, another one than the cluster's, or not the fastest that a node has."""
    planned = plan.bandwidth
    if planned is None:
        return []
    if not results.measured.sweeps:
        return [Problem(check="bandwidth", text="the plan asks for it, and it was not measured")]
    problems = _merged(
        (_where(plan, results, line.sweep, line.nodes), check, text)
        for line in results.measured.sweeps
        for check, text in _of_sweep(plan, line, results)
    )
    for group in next_round(range(plan.nodes), planned.ranks, outcomes_of(plan, results.measured.sweeps)):
        text = f"{_where(plan, results, group.sweep, group.nodes)}the plan asks for it, and it was not measured"
        problems.append(Problem(check="bandwidth", text=text))
    alone = [line for line in results.measured.sweeps if line.sweep == "node" and line.failure is None]
    if alone and not floors_of(planned, alone[0]):
        problems += _without_nvlink(results.run.machine)
    bad = named_bad(plan, results)
    problems += [Problem(check="bad-node", text=f"{results.name_of(each.node)}: {each.reason}") for each in bad]
    return problems


def drain_commands(plan: Plan, results: Results) -> tuple[str, ...]:
    """The commands that take the bad nodes out of use, for people to run."""
    return tuple(bad.drain for bad in named_bad(plan, results) if bad.drain is not None)


def named_bad(plan: Plan, results: Results) -> list[BadNode]:
    """The nodes that are bad by themselves, or with two partners."""
    if plan.bandwidth is None:
        return []
    hosts = results.measured.hosts
    nodes = sorted({*range(plan.nodes), *(node for line in results.measured.sweeps for node in line.nodes)})
    found = bad_nodes(nodes, outcomes_of(plan, results.measured.sweeps))
    return [BadNode(node, hosts.get(node), _reason(hosts, node, groups)) for node, groups in found.items()]


def _where(plan: Plan, results: Results, sweep: str, nodes: Sequence[int]) -> str:
    """What a text about a sweep begins with; nothing where there is one node."""
    if plan.nodes == 1:
        return ""
    if sweep == "ramp":
        return f"{len(nodes)} nodes: "
    return f"{' and '.join(map(results.name_of, nodes))}: "


def _reason(hosts: Mapping[int, str], node: int, groups: Sequence[Group]) -> str:
    """Why a node is bad, in letters that a shell leaves alone."""
    partners = [each for group in groups for each in group.nodes if each != node]
    names = [host if (host := hosts.get(each)) and _HOST.fullmatch(host) else f"node {each}" for each in partners]
    alone = ["by itself"] if any(group.sweep == "node" for group in groups) else []
    return f"fails {' and '.join([*alone, *(f'with {name}' for name in names)])}, where other nodes pass"


def _of_sweep(plan: Plan, line: BandwidthLine, results: Results) -> Iterator[tuple[Check, str]]:
    """What is wrong with a sweep, by check."""
    for shortfall in shortfalls(plan, line):
        why = _why(plan, line, _variables(results, line.nodes)) if shortfall.check == "transport" else ""
        yield shortfall.check, f"{shortfall.text}{why}"
    if line.failure is None:
        yield from (("transport", text) for text in _in_a_node(plan, line, results))


def _machines(results: Results, nodes: Sequence[int]) -> list[Machine]:
    own = [results.run.machine] if 0 in nodes else []
    return own + [line.machine for line in results.nodes if line.node in nodes]


def _variables(results: Results, nodes: Sequence[int]) -> list[str]:
    """What was set on some nodes, as NAME=VALUE."""
    machines = _machines(results, nodes)
    return [f"{name}={value}" for machine in machines for name, value in machine.variables.items()]


def _why(plan: Plan, line: BandwidthLine, variables: Sequence[str]) -> str:
    """The cause of another network than the cluster's, as far as NCCL's log and the variables show it."""
    if line.backend not in (None, NCCL):
        return ". Leave [transport] out of the file of a cluster whose jobs have no GPUs"
    if plan.transport == SOCKET:
        return ". Name the network that is there in the cluster's file, or set NCCL_NET=Socket"
    built_in = plan.transport in _BUILT_IN
    seen = [*line.network_log, *variables]
    causes = [
        cause
        for pattern, cause, about in _CAUSES
        if about in (None, built_in) and any(re.search(pattern, text) for text in seen)
    ]
    return f". {'; '.join(causes) or _USUAL[built_in]}"


def _merged(texts: Iterable[tuple[str, Check, str]]) -> list[Problem]:
    """One problem for all sweeps of which the same is to be said."""
    where: dict[tuple[Check, str], list[str]] = {}
    for name, check, text in texts:
        where.setdefault((check, text), []).append(name)
    problems = []
    for (check, text), names in where.items():
        shown = "; ".join(name.removesuffix(": ") for name in names[:MOST_NAMED])
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        problems.append(Problem(check=check, text=f"{shown}{more}: {text}" if shown else text))
    return problems


def _in_a_node(plan: Plan, line: BandwidthLine, results: Results) -> Iterator[str]:
    """A slower way between ranks of one node than there is: something turned the faster ones off."""
    if line.ranks < 2:
        return
    if line.backend != NCCL:
        if plan.device == "cuda":
            yield f"GPUs communicated by {line.backend}, not by {NCCL}"
        return
    if not line.transports:
        yield "NCCL's log names no transport, so the one that was used is unknown"
        return
    if line.sweep != "node":
        return
    # Measured: with 4 H200 349 GB/s over P2P, and 2 to 3 over sockets; with 2 H100 225 over P2P, and 27 over SHM.
    slow = [name for name in line.transports if name.startswith(SOCKET)]
    faster = "NVLink, PCIe or shared memory"
    if not slow and all(_joined_by_nvlink(machine) for machine in _machines(results, line.nodes)):
        slow, faster = [name for name in line.transports if name.startswith(SHARED_MEMORY)], "NVLink"
    if not slow:
        return
    variables = results.run.machine.variables
    off = [f"{name}={value}" for name, value in variables.items() if name.endswith("_DISABLE") and value != "0"]
    why = f" ({', '.join(off)})" if off else ""
    text = f"ranks of one node communicate by {', '.join(slow)}{why}; they have {faster}"
    if "IB" in (variables.get("NCCL_NET", ""), *variables.get("NCCL_NET_PLUGIN", "").split(",")):
        text += ", and the variables ask for InfiniBand"
    yield text


def _names(machine: Machine) -> dict[str, str]:
    return {f"GPU{gpu.index}": gpu.name for gpu in machine.gpus}


def _joined_by_nvlink(machine: Machine) -> bool:
    """Whether each GPU is known to be joined to each other one so."""
    return machine.topology is not None and not any(_not_nvlink(machine, _names(machine)))


def _without_nvlink(machine: Machine) -> list[Problem]:
    """GPUs on a board with NVLink that are joined by PCIe: the links are down, or a virtual machine hides them."""
    names = _names(machine)
    if len(names) < 2 or not all(_WITH_NVLINK.search(name) for name in names.values()):
        return []
    for name, other, link in _not_nvlink(machine, names):
        text = f"{name} and {other} ({names[name]}) are joined by {link} and not by NVLink; see nvidia-smi "
        why = "nvlink --status. Where that is meant, name a cluster with a floor (--on)"
        return [Problem(check="transport", text=text + why)]
    return []


def _not_nvlink(machine: Machine, names: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Pairs of these GPUs that are joined by something else, as nvidia-smi's topology has it; and by what."""
    # A head that names the columns; in each row its name first.
    rows = [row for line in (machine.topology or "").splitlines() if (row := line.split())]
    head = next((row for row in rows if row[:1] == ["GPU0"]), [])
    for name, *cells in rows[1:]:
        for other, link in zip(head, cells, strict=False):
            if name in names and other in names and name != other and not link.startswith("NV"):
                yield name, other, link
