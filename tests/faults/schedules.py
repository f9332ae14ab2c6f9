"""Faults of Adam and of the schedules of its learning rate and weight decay."""

from __future__ import annotations

from faults.baselines import baseline_fault
from faults.cases import SCHEDULED, SCHEDULED_AGAIN
from faults.kinds import edit
from faults.library import CORE, library_fault

SCHEDULER = f"{CORE}/optimizer_param_scheduler.py"
OPTIMIZERS = f"{CORE}/optimizer/__init__.py"
_BETAS = '                "betas": (config.adam_beta1, config.adam_beta2),\n'

SCHEDULES = (
    baseline_fault(
        "second-beta-ignored",
        "Adam has its default second beta and not the configuration's",
        edit(OPTIMIZERS, _BETAS, '                "betas": (config.adam_beta1, 0.999),\n'),
        SCHEDULED,
        "step 3: loss of the reference",
    ),
    baseline_fault(
        "betas-swapped",
        "Adam has the first beta for the second, and the second for the first",
        edit(OPTIMIZERS, _BETAS, '                "betas": (config.adam_beta2, config.adam_beta1),\n'),
        SCHEDULED,
        "of the reference",
    ),
    baseline_fault(
        "bias-correction-dropped",
        "Adam's moments are not corrected for having begun at zero",
        edit(
            OPTIMIZERS,
            "            optimizer = adam_cls(**kwargs)\n",
            (
                "            optimizer = adam_cls(**kwargs)\n"
                "            def uncorrected(optimizer, *_):\n"
                "                for state in optimizer.state.values():\n"
                "                    state['step'].fill_(10000.0)\n"
                "            optimizer.register_step_pre_hook(uncorrected)\n"
            ),
        ),
        SCHEDULED,
        "of the reference",
    ),
    baseline_fault(
        "warm-up-begins-at-zero",
        "a warm-up begins at zero, and not with the learning rate that it is told",
        edit(SCHEDULER, "        self.init_lr = init_lr\n", "        self.init_lr = 0.0\n"),
        SCHEDULED,
        "step 2: loss of the reference",
    ),
    baseline_fault(
        "decay-to-zero",
        "the learning rate decays to zero, and not to the least that it is told",
        edit(SCHEDULER, "        min_lr = param_group.get('min_lr', self.min_lr)\n", "        min_lr = 0.0\n"),
        SCHEDULED,
        "of the reference",
    ),
    baseline_fault(
        "decay-from-the-first-step",
        "the cosine counts the steps of the warm-up too",
        edit(
            SCHEDULER,
            "        num_steps_ = self.num_steps - self.lr_warmup_steps\n",
            "        num_steps_ = self.num_steps\n",
            "        decay_steps_ = self.lr_decay_steps - self.lr_warmup_steps\n",
            "        decay_steps_ = self.lr_decay_steps\n",
        ),
        SCHEDULED,
        "of the reference",
    ),
    baseline_fault(
        "weight-decay-grows-linearly",
        "weight decay grows linearly where it is told to follow a cosine",
        edit(
            SCHEDULER,
            "            coeff = 0.5 * (math.cos(math.pi * (1 - incr_ratio)) + 1.0)\n",
            "            coeff = incr_ratio\n",
        ),
        SCHEDULED,
        "from the reference",
    ),
    library_fault(
        "schedule-behind-after-resuming",
        "a resumed training has the learning rate of an earlier step",
        edit(
            SCHEDULER,
            "        self.step(increment=num_steps)\n",
            "        self.step(increment=num_steps // 2)\n",
        ),
        SCHEDULED_AGAIN,
        "parity-loss",
    ),
)
