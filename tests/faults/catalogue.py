"""The catalogue of planted faults: what can be wrong with a training environment, and the check that must say so."""

from __future__ import annotations

from faults.cases import DATA, PIPELINE
from faults.kinds import Fault, Scenario, Spoil, Switch
from faults.library import LIBRARY
from faults.processes import PROCESS

WHEELS = (
    Fault(
        id="extension-missing",
        broken="an extension is missing, and its package takes a fallback without a word",
        where="wheel",
        plant=Spoil(name="extension_removed"),
        case=DATA,
        check="environment",
        says="file-missing",
        at="run",
        asked="extension missing and silently replaced by a fallback",
        quick=True,
    ),
    Fault(
        id="bytecode-changed",
        broken="the bytecode of a module is not its source's: the source is the wheel's, and what runs is not",
        where="wheel",
        plant=Spoil(name="bytecode_changed"),
        case=DATA,
        check="environment",
        says="bytecode-differs",
        at="run",
        quick=True,
    ),
    Fault(
        id="code-at-start",
        broken="every interpreter runs code as it starts that no package brought",
        where="wheel",
        plant=Spoil(name="code_at_start"),
        case=DATA,
        check="environment",
        says="startup-code",
        at="run",
    ),
    Fault(
        id="megatron-shadowed",
        broken="megatron.core is imported from a checkout on PYTHONPATH, in the same namespace as the lock's",
        where="wheel",
        plant=Spoil(name="megatron_on_the_path"),
        case=DATA,
        check="environment",
        says="shadowed",
        at="run",
    ),
    Fault(
        id="extension-changed",
        broken="an extension is not the one that was locked: another byte",
        where="wheel",
        plant=Spoil(name="extension_changed"),
        case=DATA,
        check="environment",
        says="file-differs",
        at="run",
    ),
    Fault(
        id="torch-shadowed",
        broken="another torch stands before the environment's on the path",
        where="wheel",
        plant=Spoil(name="torch_shadowed"),
        case=DATA,
        check="environment",
        says="shadowed",
        at="run",
        asked="torch shadowed by another on the path",
        quick=True,
    ),
    Fault(
        id="version-differs",
        broken="a package is of another version than the lock's",
        where="wheel",
        plant=Spoil(name="other_version"),
        case=DATA,
        check="environment",
        says="version-mismatch",
        at="run",
        asked="a component's version differing from the lock",
    ),
    Fault(
        id="package-removed",
        broken="a package of the lock is not installed",
        where="wheel",
        plant=Spoil(name="package_removed"),
        case=DATA,
        check="environment",
        says="package-missing",
        at="run",
    ),
    Fault(
        id="two-nccls",
        broken="a machine's own NCCL is found before the one of the environment",
        where="wheel",
        plant=Spoil(name="second_nccl"),
        case=DATA,
        check="environment",
        says="library-twice",
        at="run",
        asked="two NCCLs",
    ),
)

# Between plan, run and judge: each is set up by a test of its own.
RUNS = (
    Fault(
        id="results-of-another-image",
        broken="the results are of the image that was there before",
        where="run",
        plant=Scenario(),
        case=DATA,
        check="ResultsRefusedError",
        says="image",
        at="run",
        asked="stale results of another image",
        quick=True,
    ),
    Fault(
        id="results-of-another-plan",
        broken="the results are of another plan with the same cases",
        where="run",
        plant=Scenario(),
        case=DATA,
        check="ResultsRefusedError",
        says="plan",
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
        says="runner-ended",
        at="run",
    ),
    Fault(
        id="runner-that-does-nothing",
        broken="the runner ends with 0 and leaves no results, as NeMo-Run's experiment does after a failed job",
        where="process",
        plant=Switch(name="runner-that-does-nothing", always=True),
        check="ResultsRefusedError",
        case=DATA,
        says="missing",
        at="run",
        asked="exit 0 with no results",
    ),
    Fault(
        id="slow-network",
        broken="ranks of one node speak through something slow",
        where="network",
        plant=Scenario(),
        case=DATA,
        check="bandwidth",
        says="the floor is",
        at="run",
    ),
    Fault(
        id="transport-by-sockets",
        broken="NCCL's own log says that ranks of one node speak through sockets",
        where="network",
        plant=Scenario(),
        case=DATA,
        check="transport",
        says="NET/Socket",
        at="run",
        asked="transport fallen back to sockets",
    ),
    Fault(
        id="results-of-a-part",
        broken="the results are whole and of the plan, and one of its cases was never run",
        where="run",
        plant=Scenario(),
        case=DATA,
        check="not-reported",
    ),
    Fault(
        id="noise",
        broken="two runs of the same case do not give the same digits",
        where="process",
        plant=Scenario(),
        case=PIPELINE,
        check="repeats",
        at="case",
    ),
)

FAULTS = (*LIBRARY, *PROCESS, *WHEELS, *RUNS)
BY_ID = {fault.id: fault for fault in FAULTS}


def fault_named(name: str) -> Fault:
    """The entry with this ID."""
    return BY_ID[name]
