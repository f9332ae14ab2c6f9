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
        "sha256:dde0727769750928f6c4c37bf76634f437ca05cfd833cd8cd3907b5169dcf704",  # gathered-logits
        "sha256:54628483a060ae6f7bbcd59d8852892941c12aea1fb0a847fd249364f439dce1",  # interleaved-batched-p2p
        "sha256:0e70afac273871bf3fcf82eb7f8009c464f020e716e66a40beea0d60a708cac6",  # learning-rates-after-loading
        "sha256:788d85703d61a915a445c8d7abafc64d32fac2f99a662507c02025f1b1234237",  # lora-gathered-norm
        "sha256:e506806c79f61d51a27ca4ad842fc9a5f5a45c6674b57a682a1d71ef1fc3382a",  # mamba-epsilon
        "sha256:243d9c138bd0b3bc82d0f114f7191c1dc59b2219835ed21edc715fdce1a70fc3",  # masked-loss-in-contexts
        "sha256:7e2566be90b07a4b71bc3bf1769df38094492566a94d2bf8535ee37e46eeab53",  # norm-of-grouped-experts
        "sha256:ffa1558e8ae2a8384e5bd88d68f5a7c9b0db6debc36906869149ec25cfb5fa1f",  # optimizer-state-in-buckets
        "sha256:58dc7f15effafdea20cbecf77c8b4e9d9215c7e56f0c9ef96bbaf4ebcaa18014",  # overlap-of-instances
        "sha256:33f5e9162c3b546a51d36d2a0c8f6498dbed9ef9334787797ccdeb412f7de535",  # router-losses-in-contexts
        "sha256:beaa12c46727d72309a8c01e3ced9ed9960fa29b4d85fd8343487b51650e86cb",  # router-losses-per-token
        "sha256:a0d9899e1c682cd6419da5d1267f57c0f283f9a185e9dcddd56ba96b665dc312",  # sequence-loss-per-token
        "sha256:243c8748bcddd508f3180656e43ec266bef9cde8cafba78faf83ab46e9679706",  # whole-experts
    }
)
