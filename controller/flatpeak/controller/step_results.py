"""What the results of all ranks come to."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod

from flatpeak.controller.mirrors import NOTHING_MIRRORED, Mirrored
from flatpeak.controller.runs import TOTAL, StepRecord, highest_of
from flatpeak.controller.spec import Spec
from flatpeak.workers.data import sample_ids
from flatpeak.workers.dispatch import worst_of
from flatpeak.workers.errors import DoesNotFit
from flatpeak.workers.settings import dispatch_budget_of
from flatpeak.workers.trainer import StepResult


def check_budget(results: Mapping[str, StepResult], budget: int | None) -> None:
    """Raises DoesNotFit when a worker's peak was above `budget` bytes; None sets no limit."""
    for who, result in results.items():
        if budget is not None and result.peaks.get(TOTAL, 0) > budget:
            parts = {name: held for name, held in result.peaks.items() if name != TOTAL}
            worst = max(parts, key=lambda name: parts[name])
            raise DoesNotFit(
                f"{who} reached {result.peaks[TOTAL]:,} bytes in step {result.step}, above "
                f"memory.device_budget_bytes = {budget:,}; its largest part is {worst} with "
                f"{parts[worst]:,}. Lower memory.dispatch.budget_bytes or "
                "memory.vocabulary.token_tile, use more microbatches or workers, or raise the "
                "budget"
            )


def step_record(
    spec: Spec,
    results: Sequence[StepResult],
    rate: float,
    seconds: float,
    mirrored: Mirrored = NOTHING_MIRRORED,
) -> StepRecord:
    """The line of a step at learning rate `rate` that took `seconds`, from all ranks' `results` and
    what was `mirrored` of it."""
    first = results[0]
    ids = sample_ids(first.step - 1, spec.train.sequences_per_step)
    straggler, lag_s = straggler_of([result.waited_s for result in results])
    return StepRecord(
        step=first.step,
        time=time.time(),
        loss=first.loss,
        nll=first.nll,
        grad_norm=first.grad_norm,
        lr=rate,
        tokens=first.tokens,
        tokens_per_s=first.tokens / seconds,
        step_seconds=seconds,
        peak_bytes=highest_of([result.peaks for result in results]),
        device_budget_bytes=spec.memory.device_budget_bytes,
        planned_peak_bytes=highest_of([result.planned for result in results]),
        dispatch=worst_of(result.dispatch for result in results).figures()
        | {"budget_bytes": dispatch_budget_of(spec)},
        optimizer={
            "buckets": sum(result.refresh.buckets for result in results),
            "overlapped_buckets": sum(r.refresh.overlapped_buckets for r in results),
            "exposed_s": max(result.refresh.exposed_s for result in results),
            "sent_bytes": sum(result.sent_bytes for result in results),
            "received_bytes": sum(result.received_bytes for result in results),
            "mirrored_bytes": mirrored.nbytes,
            "mirror_s": mirrored.seconds,
        },
        boundaries=highest_of([asdict(result.boundaries) for result in results]),
        straggler=straggler,
        lag_s=lag_s,
        skipped=not first.usable,
        first_sample=ids[0],
        last_sample=ids[-1],
    )


def straggler_of(waits: Sequence[float | None]) -> tuple[int | None, float | None]:
    """The rank for which the others waited, and the seconds, from what each rank waited for all."""
    known = [wait for wait in waits if wait is not None]
    if len(known) < max(2, len(waits)):
        return None, None
    return known.index(min(known)), max(known) - min(known)


def larger_shapes(
    one: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Of every component the shape with more elements."""
    return {name: max(one.get(name, (0,)), other.get(name, (0,)), key=prod) for name in one | other}
