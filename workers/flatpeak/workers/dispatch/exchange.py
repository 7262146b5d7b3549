"""All-to-all of rows between the ranks of an expert group.

Every exchange is issued by all ranks in the same order, an empty one included, so none can wait for
an exchange that another rank skipped.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.routing import Group


class Arriving:
    """Rows under way. Neither the sent nor the landing rows may be touched before `wait`."""

    def __init__(self, landing: torch.Tensor, sent: torch.Tensor, work: dist.Work | None) -> None:
        self._landing = landing
        # Held for the collective, which reads it.
        self._sent: torch.Tensor | None = sent
        self._work = work

    def wait(self) -> torch.Tensor:
        """The landed rows. Work issued to the current lane from now on follows the arrival."""
        if self._work is not None:
            self._work.wait()
        self._work = self._sent = None
        return self._landing


def exchange(
    rows: torch.Tensor,
    landing: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: Group,
) -> Arriving:
    """Send `send[r]` consecutive rows to each rank r; `receive[r]` of them land, in rank order.

    `rows` and `landing` are contiguous and have the sums of the two as their lengths.
    """
    if group is None:
        return Arriving(landing, rows, None)
    work = dist.all_to_all_single(
        landing, rows, list(receive), list(send), group=group, async_op=True
    )
    return Arriving(landing, rows, work)
