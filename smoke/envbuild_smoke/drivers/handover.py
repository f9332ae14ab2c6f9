"""What the ranks of one part of a case tell those of the next one, which may be more or fewer, and on other nodes."""

import json
from dataclasses import asdict, dataclass

from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.rank_context import RankContext
from envbuild_smoke.results import HuggingFace


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What was measured so far: the digest of all samples that were read, and a model that was imported."""

    samples: str = ""
    hugging_face: HuggingFace | None = None


def hand_over(context: RankContext, handover: Handover) -> None:
    """Leave it for the next part, next to the checkpoint; one rank does this, before its part ends."""
    context.handover.write_text(json.dumps(asdict(handover)), encoding="utf-8")


def handed_over(context: RankContext) -> Handover:
    """Return what the part before has left; nothing for the first part."""
    if context.part.after == 0:
        return Handover()
    return read_object(Handover, json.loads(context.handover.read_text(encoding="utf-8")), "handover")
