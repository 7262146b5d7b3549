"""How far a controller that died had come, read from what outlived it."""

from flatpeak.controller.optimizer_team import Update
from flatpeak.controller.runs import StepRecord
from flatpeak.workers.errors import UpdateLost
from flatpeak.workers.gradients import clipping_factor


def update_under_way(
    versions: set[int], last: StepRecord | None, max_grad_norm: float | None
) -> Update:
    """The last update that was asked of arenas whose buckets have these `versions`.

    Where all have the same one it is done. Else some have the one after, and the update has begun:
    its step's record was written before, and `last` is that one. Raises UpdateLost when it is not,
    because a full disk did not take it.
    """
    lowest, highest = min(versions), max(versions)
    if lowest == highest:
        return Update(highest, 0.0, None)
    assert highest == lowest + 1, f"buckets have versions {sorted(versions)}"
    if last is None or last.step != highest:
        raise UpdateLost(
            f"the controller died in the update of step {highest}, and steps.jsonl does not say "
            "with what, since its disk was full"
        )
    factor = None if last.skipped else clipping_factor(last.grad_norm, max_grad_norm)
    return Update(highest, last.lr, factor)
