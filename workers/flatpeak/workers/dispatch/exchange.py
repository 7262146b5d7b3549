"""What travels between the ranks of an expert group: rows all to all, single tensors in pairs.

Every all-to-all is issued by all ranks in the same order, an empty one included, so none can wait
for one that another rank skipped. Of tensors in pairs, both sides know from the plan which there
are and in which order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.routing import Group
from flatpeak.workers.progress import waiting


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
            with waiting():
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


@dataclass(frozen=True)
class Letter:
    """A contiguous tensor to or from another rank of the group."""

    tensor: torch.Tensor
    rank: int


def trade(outbox: Iterable[Letter], inbox: Iterable[Letter], group: Group) -> list[dist.Work]:
    """Start to send and receive letters. Between two ranks they match in the order given."""
    operations = [
        dist.P2POp(operation, letter.tensor, group=group, group_peer=letter.rank)
        for operation, letters in ((dist.isend, outbox), (dist.irecv, inbox))
        for letter in letters
    ]
    return dist.batch_isend_irecv(operations) if operations else []
