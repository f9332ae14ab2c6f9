"""The catalogue of planted faults: what can be wrong with a training environment, and the check that must say so."""

from __future__ import annotations

from faults.axes import AXES
from faults.baselines import BASELINES
from faults.cases import DATA, OVER_NODES, PIPELINE
from faults.documents import DATASETS
from faults.families import FAMILIES
from faults.gradients import GRADIENTS
from faults.kinds import Corruption, Fault, Switch
from faults.library import LIBRARY
from faults.mixed_precision import MIXED_PRECISION
from faults.processes import PROCESS
from faults.schedules import SCHEDULES


# What an installed environment has that its lock has not shows in every case.
def wheel_fault(name: str, broken: str, plant: Corruption, text: str, *, quick: bool = False) -> Fault:
    where = {"where": "wheel", "at": "run", "case": DATA}
    return Fault(id=name, broken=broken, plant=plant, text=text, quick=quick, check="environment", **where)


WHEELS = (
    wheel_fault(
        "extension-missing",
        "an extension is missing, and its package takes a fallback without a word",
        Corruption(name="extension_removed"),
        "file-missing",
        quick=True,
    ),
    wheel_fault(
        "bytecode-changed",
        "the bytecode of a module is not its source's: the source is the wheel's, and what runs is not",
        Corruption(name="bytecode_changed"),
        "bytecode-differs",
        quick=True,
    ),
    wheel_fault(
        "code-at-start",
        "every interpreter runs code as it starts that no package brought",
        Corruption(name="code_at_start"),
        "startup-code",
    ),
    wheel_fault(
        "unlisted-optimizer",
        "an optimizer that no package of the lock brought lies in the environment, and megatron-core takes it",
        Corruption(name="stub_optimizer"),
        "imported-unlisted: apex",
        quick=True,
    ),
    wheel_fault(
        "megatron-shadowed",
        "megatron.core is imported from a checkout on PYTHONPATH, in the same namespace as the lock's",
        Corruption(name="megatron_on_the_path"),
        "shadowed",
    ),
    wheel_fault(
        "extension-changed",
        "an extension is not the one that was locked: another byte",
        Corruption(name="extension_changed"),
        "file-differs",
    ),
    wheel_fault(
        "torch-shadowed",
        "another torch stands before the environment's on the path",
        Corruption(name="torch_shadowed"),
        "shadowed",
        quick=True,
    ),
    wheel_fault(
        "version-differs",
        "a package is of another version than the lock's",
        Corruption(name="other_version"),
        "version-mismatch",
    ),
    wheel_fault(
        "package-removed",
        "a package of the lock is not installed",
        Corruption(name="package_removed"),
        "package-missing",
    ),
    wheel_fault(
        "two-nccls",
        "a machine's own NCCL is loaded in the place of the environment's",
        Corruption(name="second_nccl"),
        "library-twice",
    ),
)

# Between plan, run and judge: each is set up by a test of its own.
RUNS = (
    Fault(
        id="results-of-another-image",
        broken="the results are of the image that was there before",
        where="run",
        case=DATA,
        check="ResultsRefusedError",
        text="image",
        at="run",
        quick=True,
    ),
    Fault(
        id="another-python-in-the-image",
        broken="inside the image the plan is run by another Python than the one that the image has its packages for",
        where="run",
        case=DATA,
        check="environment",
        text="other-python",
        at="run",
        quick=True,
    ),
    Fault(
        id="results-of-another-plan",
        broken="the results are of another plan with the same cases",
        where="run",
        case=DATA,
        check="ResultsRefusedError",
        text="plan",
        at="run",
        quick=True,
    ),
    Fault(
        id="killed-runner",
        broken="the runner is killed in the middle of a case",
        where="process",
        plant=Switch(name="killed-runner", always=True),
        check="CertificationCannotRunError",
        case=DATA,
        text="runner-ended",
        at="run",
    ),
    Fault(
        id="runner-that-does-nothing",
        broken="the runner ends with 0 and leaves no results, as NeMo-Run's experiment does after a failed job",
        where="process",
        plant=Switch(name="runner-that-does-nothing", always=True),
        check="ResultsRefusedError",
        case=DATA,
        text="missing",
        at="run",
    ),
    Fault(
        id="slow-network",
        broken="ranks of one node speak through something slow",
        where="network",
        case=DATA,
        check="bandwidth",
        text="the floor is",
        at="run",
    ),
    Fault(
        id="transport-by-sockets",
        broken="NCCL's own log says that ranks of one node speak through sockets",
        where="network",
        case=DATA,
        check="transport",
        text="NET/Socket",
        at="run",
    ),
    Fault(
        id="sockets-between-nodes",
        broken="NCCL's own log says that nodes speak through sockets, where the cluster has InfiniBand",
        where="network",
        case=DATA,
        check="transport",
        text="ranks communicated by NET/Socket; the cluster's file expects NET/IB. NCCL_IB_DISABLE is set",
        at="run",
    ),
    Fault(
        id="one-node-by-sockets",
        broken="one node of four speaks through sockets, whoever its partner is",
        where="network",
        case=DATA,
        check="bad-node",
        text="node 3",
        at="run",
    ),
    Fault(
        id="another-package-on-one-node",
        broken="one node has another version of a package than the others and the lock",
        where="run",
        case=DATA,
        check="nodes",
        text="node 1",
        at="run",
        quick=True,
    ),
    Fault(
        id="other-samples-on-one-node",
        broken="one node reads other samples than the others, in all of its cases",
        where="process",
        case=DATA,
        check="node-numbers",
        text="node 2",
        at="run",
    ),
    Fault(
        id="slow-node",
        broken="one node takes twice as long as the others until it communicates",
        where="process",
        case=OVER_NODES,
        check="node-slow",
        text="node 1",
        at="run",
    ),
    Fault(
        id="results-of-a-part",
        broken="the results are whole and of the plan, and one of its cases was never run",
        where="run",
        case=DATA,
        check="not-reported",
    ),
    Fault(
        id="noise",
        broken="two runs of the same case do not give the same digits",
        where="process",
        case=PIPELINE,
        check="repeats",
        at="case",
    ),
)

FAULTS = (
    *(*LIBRARY, *AXES, *BASELINES, *MIXED_PRECISION, *SCHEDULES, *GRADIENTS, *FAMILIES, *DATASETS),
    *(*PROCESS, *WHEELS, *RUNS),
)


def fault_named(name: str) -> Fault:
    """The entry with this ID."""
    return next(fault for fault in FAULTS if fault.id == name)
