"""A matrix for tests: the first six cases of the one that ships, one model in six layouts."""

from __future__ import annotations

from pathlib import Path

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.matrix import Matrix
from envbuild_smoke.plan.axes import Training

_TRAINING = (
    "steps",
    "micro_batch_size",
    "global_batch_size",
    "learning_rate",
    "clip_grad_norm",
    "weight_decay",
    "seed",
)


def six_layouts() -> Matrix:
    """certify-quick with nothing but its baseline, DP 2, TP 2, PP 2, PP 2 x 2 and TP 2 x PP 2, at one learning rate."""
    shipped = Catalog.open(Path("/nonexistent")).matrix("certify-quick")
    plain = Training(**{name: getattr(shipped.training, name) for name in _TRAINING})
    models = {"gpt": shipped.models["gpt"]}
    return shipped.model_copy(update={"cases": shipped.cases[:6], "models": models, "training": plain})
