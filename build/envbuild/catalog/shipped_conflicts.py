"""The conflicts that envbuild ships, by the digest of what they excuse.

Where envbuild runs from a checkout, ``envs/`` is the project's and the shipped one: a file's place does not say whose
it is. A conflict that is not among these is a project's own, and excuses no case of a matrix that has to be whole.
"""

from __future__ import annotations

from envbuild.catalog.conflict import Conflict
from envbuild.core.digests import digest_of


def excuse_digest(entry: Conflict) -> str:
    """The digest of what an entry excuses: its versions and its cases, without its texts."""
    return digest_of(entry.model_dump(mode="json", include={"packages", "cases"}))


# tests/unit/catalog/test_shipped_conflicts.py prints what is missing.
SHIPPED = frozenset(
    {
        "sha256:b30313249515db4064f0c1264ca385d7fce940f36186ced4346b1ec8f8dc2698",  # gathered-logits
        "sha256:91da9a5b054d3f4e429251fa360685f9f8e46f93b96ecd23ed260e38f7cad70a",  # interleaved-batched-p2p
        "sha256:8cb548bd91ef551a2ef82a69967b53de659826e0ff5f31f1e39b8e6cb927792d",  # latent-key-in-tensor-parallel
        "sha256:da040eddfc99773a73380e10ea1788de90e531a0a24a1fe1acf320444056778f",  # learning-rates-after-loading
        "sha256:788d85703d61a915a445c8d7abafc64d32fac2f99a662507c02025f1b1234237",  # lora-gathered-norm
        "sha256:aee8b6b55d5db4f2b43d9dac31fb7104988a4e5d09c33816e5c4ebe4a28f4c6d",  # loss-gradient-in-bf16
        "sha256:6421ab986984dac19965220a4bf1eaebf4a20a6d3be8fd82b259dfcb21c1ccf0",  # mamba-epsilon
        "sha256:d58f913148326199cc270eb1edfaaa299e8f2930cf4a76ca6f2744ec0128d123",  # masked-loss-in-contexts
        "sha256:d595bec8a6da0e0712bff5587206ca156e46c15f11b5c8339f8ccb81e78fbe18",  # no-sinks-of-its-own
        "sha256:853f17f2971d9f0a3612cdae8aca1a8925a37d3c34a5e365b841ae0845aa804e",  # norm-of-grouped-experts
        "sha256:66980bcb4f7f602b4c0b1cbbc88a06fb06663952f46f14aefad62f39d1df5713",  # optimizer-state-in-buckets
        "sha256:58dc7f15effafdea20cbecf77c8b4e9d9215c7e56f0c9ef96bbaf4ebcaa18014",  # overlap-of-instances
        "sha256:8f18372fecffe7e93757c584ac4d5744058e8af94e7aebd2bc44b14b27d6abc9",  # router-losses-in-contexts
        "sha256:8fb787f51ed213916f9c247e53919acc2971ef7b3fcb3ec535a49b93b8c2a299",  # router-losses-per-token
        "sha256:307d827e4c6a539b81e4a5ad67e2ac5078e548fc55711282b785af4512373657",  # sequence-loss-per-token
        "sha256:5cece43d2bd1f551a220e3564fda187b5266be408b81fc8b84dc156c1c11cbc8",  # sinks-of-other-ranks
        "sha256:bcd80ebfd272d13a2e9362cb0c38755cce1f326c06fdf38f425211235aa2b0b7",  # whole-experts
    }
)
