"""The learning rate as a pure function of the step, so that resume and resize cannot change it."""

import math

from flatpeak.controller.spec import TrainSpec


def lr(step: int, *, train: TrainSpec) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Rises linearly and reaches `train.lr` at `warmup_steps`, falls to `train.lr * min_lr_ratio` at
    `decay_steps` (`train.steps` when null) and stays there.
    """
    assert step >= 1, f"step {step}: steps count from 1"
    schedule = train.schedule
    if step <= schedule.warmup_steps:
        return train.lr * step / schedule.warmup_steps
    if schedule.decay == "constant":
        return train.lr
    end = schedule.decay_steps or train.steps
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, end - schedule.warmup_steps))
    left = 1 - progress if schedule.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return train.lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left)
