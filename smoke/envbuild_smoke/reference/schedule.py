"""How learning rate and weight decay change from step to step."""

import math

from envbuild_smoke.reference.config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, most: float, step: int) -> float:
    """Return the learning rate of a step, counted from 0, of a weight whose largest one is `most`.

    Warm-up is linear: Goyal et al. 2017 (arXiv 1706.02677), section 2.2. Then cosine: Loshchilov & Hutter 2016, "SGDR"
    (arXiv 1608.03983), equation 5, without restarts; inverse square root: Vaswani et al. 2017 (arXiv 1706.03762),
    equation 3; WSD: Hu et al. 2024, "MiniCPM" (arXiv 2404.06395), equation 1. Afterwards it is the least one.
    """
    least, warmup = schedule.least, schedule.warmup
    if step <= warmup and warmup > 0:
        return schedule.first + (most - schedule.first) * step / warmup
    if schedule.style == "constant":
        return most
    if step > schedule.decay:
        return least
    if schedule.style == "inverse-square-root":
        return max(least, most * math.sqrt(max(warmup, 1) / max(step, 1)))
    share = (step - warmup) / (schedule.decay - warmup)
    if schedule.style == "WSD":
        began = schedule.decay - schedule.wsd_decay
        return least + (most - least) * _annealed(schedule.wsd_style, max(0.0, (step - began) / schedule.wsd_decay))
    return least + (most - least) * _annealed(schedule.style, share)


def _annealed(style: str, share: float) -> float:
    """Return what is left of a rate after this share of its decay, 1 to 0.

    `minus_sqrt`: Hägele et al. 2024 (arXiv 2405.18392), equation 1; `exponential` halves it, as MiniCPM's footnote has
    it, scaled to end at 0.
    """
    left = {
        "linear": 1 - share,
        "cosine": (1 + math.cos(math.pi * share)) / 2,
        "minus_sqrt": 1 - math.sqrt(share),
        "exponential": 2 * math.pow(0.5, share) - 1,
    }
    return left[style]


def weight_decay(schedule: ScheduleConfig, last: float, step: int) -> float:
    """Return the weight decay of a step, counted from 0: from the first to the last one, reached after all steps.

    Caron et al. 2021, "DINO" (arXiv 2104.14294), section 3.2: a cosine; or linear.
    """
    first = last if schedule.first_weight_decay is None else schedule.first_weight_decay
    share = 1.0 if schedule.weight_decay_style == "constant" else step / schedule.steps
    return first + (last - first) * (1 - _annealed(schedule.weight_decay_style.replace("constant", "linear"), share))
