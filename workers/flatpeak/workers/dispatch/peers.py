"""How the tables of counts of one rank reach the others."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.routing import Group
from flatpeak.workers.progress import waiting


class Peers(Protocol):
    """How the tables of the ranks reach each other. Of each rank that is at hand it is given one
    table, in rank order. All ranks call it equally often."""

    def gather(self, rows: list[torch.Tensor]) -> np.ndarray:
        """Equally shaped rows of all ranks, [ranks, ...]."""
        ...

    def deal(self, tables: list[torch.Tensor], widths: Sequence[int]) -> list[np.ndarray]:
        """Give each rank r the next `widths[r]` rows of every table [sum of widths, n]: for each
        rank at hand what it got, [ranks, widths[r], n]."""
        ...


class RanksOfGroup:
    """The ranks of a process group, of which this process is one."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def gather(self, rows: list[torch.Tensor]) -> np.ndarray:
        (row,) = rows
        if self._group is None:
            return to_host(row)[None]
        gathered = row.new_empty((self._group.size(), *row.shape))
        with waiting():
            dist.all_gather(list(gathered.unbind(0)), row, group=self._group)
        return to_host(gathered)

    def deal(self, tables: list[torch.Tensor], widths: Sequence[int]) -> list[np.ndarray]:
        (table,) = tables
        if self._group is None:
            return [to_host(table)[None]]
        ranks, mine = self._group.size(), widths[self._group.rank()]
        landed = table.new_empty((ranks * mine, table.shape[1]))
        with waiting():
            dist.all_to_all_single(landed, table, [mine] * ranks, list(widths), group=self._group)
        return [to_host(landed).reshape(ranks, mine, -1)]


class Together:
    """All ranks in one process."""

    def gather(self, rows: list[torch.Tensor]) -> np.ndarray:
        return to_host(torch.stack(rows))

    def deal(self, tables: list[torch.Tensor], widths: Sequence[int]) -> list[np.ndarray]:
        parts = zip(*(table.split(list(widths)) for table in tables), strict=True)
        return [to_host(torch.stack(part)) for part in parts]


def to_host(table: torch.Tensor) -> np.ndarray:
    # A copy, so that what is kept of it on the host keeps nothing on a device that is the host.
    return np.array(table.cpu().numpy())
