"""What the results of all ranks come to."""

from collections.abc import Mapping
from math import prod

from flatpeak.controller.runs import TOTAL
from flatpeak.workers.errors import DoesNotFit
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


def largest_of(ranks: list[dict[str, int]]) -> dict[str, int]:
    """The worst rank of every component or figure."""
    names = sorted({name for rank in ranks for name in rank})
    return {name: max(rank.get(name, 0) for rank in ranks) for name in names}


def larger_shapes(
    one: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Of every component the shape with more elements."""
    return {name: max(one.get(name, (0,)), other.get(name, (0,)), key=prod) for name in one | other}
