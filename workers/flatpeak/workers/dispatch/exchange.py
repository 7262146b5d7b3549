"""All-to-all of rows between the ranks of an expert group.

Every exchange is issued by all ranks in the same order, an empty one included, so none can wait for
an exchange that another rank skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.routing import Group


@dataclass
class Arriving:
    """Rows under way. The sent rows are held until `wait`, for the collective reads them."""

    rows: torch.Tensor
    sent: torch.Tensor | None
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        self.work = self.sent = None
        return self.rows


def exchange(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
) -> Arriving:
    """Send `send[r]` consecutive rows to each rank r, and receive `receive[r]`, in rank order."""
    if group is None:
        return Arriving(rows, None, None)
    landing = rows.new_empty((sum(receive), *rows.shape[1:]))
    work = dist.all_to_all_single(
        landing, rows.contiguous(), list(receive), list(send), group=group, async_op=True
    )
    return Arriving(landing, rows, work)
