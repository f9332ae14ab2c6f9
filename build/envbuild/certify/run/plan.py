"""``plan.json``: all that the smoke runner gets. Its types live with smoke."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envbuild.catalog.catalog import definition_digest
from envbuild.catalog.cluster import Collective, Floors
from envbuild.catalog.conflict import Conflict
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.model_spec import ModelSpec
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.judge.judge import JUDGE_VERSION
from envbuild.certify.run.home_nodes import home_nodes
from envbuild.core.digests import Json, digest_of
from envbuild.launch.launchers import SQSH, Placement
from envbuild_smoke.plan.architecture import PLAIN

PLAN_SCHEMA = "envbuild.plan/4"
# How often a baseline trains again with its weights moved, which its bands are measured from.
PERTURBED_RUNS = 4
# Enough for NCCL to connect all channels.
TRANSPORT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a certificate is about: names, and the digests of the lock and the image.

    Attributes:
        name: what the image is called where it was put; no part of what is certified.
        oci_digest: None where no image is certified.
        sqsh_digest: None also where the image has no .sqsh.
    """

    name: str
    stack: str
    base: str
    target: str
    lock_digest: str
    oci_digest: str | None = None
    sqsh_digest: str | None = None
    place: Placement = SQSH

    @property
    def image_digests(self) -> dict[str, str]:
        """The digest of each form of the image, as people call it; empty without an image."""
        forms = (("OCI image", self.oci_digest), (".sqsh", self.sqsh_digest))
        return {form: digest for form, digest in forms if digest}

    def as_json(self) -> dict[str, Json]:
        digests = {"oci_digest": self.oci_digest, "sqsh_digest": self.sqsh_digest}
        return {
            "stack": self.stack,
            "base": self.base,
            "target": self.target,
            "form": self.place.form,
            "launcher": self.place.launcher,
            "lock_digest": self.lock_digest,
            **{name: digest for name, digest in digests.items() if digest is not None},
        }


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the cases run in.

    Attributes:
        versions: of the lock's packages.
        modules: that must import.
        provided: the packages that the base brings.
    """

    capabilities: Capabilities
    driver: Driver
    versions: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[str] = ()
    provided: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Network:
    """How many nodes a run has, and what its cluster's file says of them.

    Attributes:
        floors: of the target's GPUs.
        transport: what NCCL's log has to name between nodes; None: any.
    """

    nodes: int = 1
    floors: Floors = field(default_factory=Floors)
    transport: str | None = None


def sweep_of(matrix: Matrix, capabilities: Capabilities, ranks: int, network: Network = Network()) -> Json:
    """The sweeps of collectives after the cases, over so many ranks on each node; None where there are none.

    A matrix without them has one size between nodes if the cluster's file names a network: it shows which one is used.
    """
    between = network.nodes > 1
    sweep: dict[str, Json] = {"ranks": ranks}
    wanted = matrix.bandwidth if matrix.bandwidth and capabilities.device in matrix.bandwidth.devices else None
    if wanted is not None and (ranks > 1 or between):
        return {
            **sweep,
            "sizes_bytes": list(wanted.sizes_bytes),
            "floor_gigabytes_per_second": wanted.floor_gigabytes_per_second,
            "node_floors": _floors_json(network.floors.node),
            "network_floors": _floors_json(network.floors.network) if between else {},
        }
    if between and network.transport is not None:
        # No floor is for so few bytes.
        return {**sweep, "sizes_bytes": [TRANSPORT_BYTES], "floor_gigabytes_per_second": None}
    return None


def _floors_json(floors: Mapping[Collective, float]) -> dict[str, Json]:
    return dict(floors.items())


def make_plan(
    subject: Subject,
    environment: Environment,
    matrix: Matrix,
    cases: tuple[Case, ...],
    repeats: int = 1,
    network: Network = Network(),
) -> dict[str, Json]:
    """The plan as a JSON value, with a fresh nonce."""
    capabilities = environment.capabilities
    used = {case.model for case in cases}
    homes = home_nodes(cases, network.nodes)
    return {
        "schema": PLAN_SCHEMA,
        # Results name it, so those of an equal plan that ran earlier are not taken for this one's.
        "nonce": secrets.token_hex(16),
        "subject": subject.as_json(),
        "device": capabilities.device.value,
        "gpu": {"sm": list(capabilities.sm)} if capabilities.sm else None,
        "expected_versions": dict(environment.versions),
        "expected_modules": list(environment.modules),
        "provided_packages": list(environment.provided),
        "nodes": network.nodes,
        "repeats": repeats,
        "bandwidth": sweep_of(matrix, capabilities, max(case.slots_on_node for case in cases), network),
        "transport": network.transport if network.nodes > 1 else None,
        "models": {name: _model_json(model) for name, model in matrix.models.items() if name in used},
        "cases": [{**_case_json(case, matrix, environment.driver), "home_node": homes[case.id]} for case in cases],
    }


def _model_json(model: ModelSpec) -> Json:
    return {
        "kind": model.kind,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "sequence_length": model.sequence_length,
        "vocabulary_size": model.vocabulary_size,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "layer_spec": model.layer_spec,
        **({"qkv_bias": True} if model.qkv_bias else {}),
        **({"architecture": dict(vars(model.architecture))} if model.architecture != PLAIN else {}),
        **({"recipe": model.recipe} if model.recipe else {}),
        **({"dataset": model.dataset} if model.recipe or model.dataset != "mock" else {}),
        "moe": dict(vars(model.moe)) if model.moe else None,
        **({"mla": dict(vars(model.mla))} if model.mla else {}),
        "mamba": model.mamba.model_dump(mode="json") if model.mamba else None,
    }


def _case_json(case: Case, matrix: Matrix, driver: Driver) -> dict[str, Json]:
    return {
        "id": case.id,
        "baseline": case.compared_with,
        "driver": driver.value,
        "model": case.model,
        "precision": case.precision,
        "nodes": case.nodes,
        "layout": dict(vars(case.layout)),
        "world_size": case.layout.world_size,
        "training": dict(vars(case.training)),
        "settings": dict(vars(case.settings)),
        "resume_at": case.resume_at,
        "continue_in": dict(vars(case.continue_in)) if case.continue_in else None,
        "continue_nodes": case.continue_nodes,
        "compare_weights": case.compare_weights,
        # The reference has no recipe's layers.
        "compare_reference": case.is_baseline and driver is Driver.MCORE,
        "perturbed_runs": PERTURBED_RUNS if case.is_baseline else 0,
        "time_limit_seconds": matrix.time_limit_seconds,
    }


def certification_key(
    plan: dict[str, Json], matrix: Matrix, smoke_digest: str, *, scope: str, conflicts: Mapping[str, Conflict]
) -> str:
    """The digest of all that decides a certificate: the plan but its nonce, tolerances, smoke, judge.

    Args:
        scope: the matrix's name, or that it is a part of it.
        conflicts: what the certificate does not vouch for.
    """
    tolerances: dict[str, Json] = {
        precision: band.model_dump(mode="json") for precision, band in matrix.tolerance.items()
    }
    return digest_of(
        {
            "scope": scope,
            "plan": deciding(plan),
            "tolerance": tolerances,
            "smoke": smoke_digest,
            "judge": JUDGE_VERSION,
            "not_vouched": {name: definition_digest(entry) for name, entry in conflicts.items()},
        }
    )


def deciding(plan: Mapping[str, Json]) -> dict[str, Json]:
    """The part of a plan that decides what comes out: all but its nonce."""
    return {key: value for key, value in plan.items() if key != "nonce"}
