"""Rows and routes of every chunk: counted by the rank that has the tokens, told to whom they
concern.

A table [columns, steps] counts for each step of a cut, see `Columns` and `Cut`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from flatpeak.workers.dispatch.assignment import DispatchPlan
from flatpeak.workers.dispatch.cutting import Cut
from flatpeak.workers.dispatch.peers import Peers, to_host
from flatpeak.workers.dispatch.routing import Chunk, Routing, visits
from flatpeak.workers.dispatch.shares import window_positions


class Columns:
    """Where a table of counts has what: for each rank the rows that travel to it, and after them
    the routes to each of its instances, so that its part of the table is consecutive."""

    def __init__(self, held: Sequence[int]) -> None:
        """`held`: the instances of each rank."""
        self.widths = [1 + count for count in held]
        self.starts = [0, *accumulate(self.widths)][:-1]
        ranks = np.repeat(np.arange(len(held)), held)
        self.instances = np.arange(len(ranks)) + ranks + 1


def count(
    held: Mapping[int, torch.Tensor], views: Mapping[int, Routing], peers: Peers, cut: Cut
) -> list["Counted"]:
    """Count every chunk of `cut` and tell each rank what concerns it."""
    plan = next(iter(views.values())).plan
    columns = Columns(np.diff(plan.first_instance).tolist())
    labels = {r: views[r].label(ids) for r, ids in held.items()}
    # A layer of many chunks is counted in turns, so that its tables take no more than one of few.
    at_once = steps_at_once(sum(columns.widths))
    turns = []
    for first in range(0, cut.steps, at_once):
        steps = range(first, min(first + at_once, cut.steps))
        tables = [_step_table(view, labels[r], steps, cut) for r, view in views.items()]
        dealt = peers.deal(tables, columns.widths)
        turns.append(
            [
                Counted(to_host(table)[columns.starts], got)
                for table, got in zip(tables, dealt, strict=True)
            ]
        )
    return [Counted.joined(of_rank) for of_rank in zip(*turns, strict=True)]


# Tokens that are counted in one turn, unless there are more steps.
TOKENS_AT_ONCE = 16384
# Numbers in the table of a rank.
_CELLS = 4096


def steps_at_once(columns: int) -> int:
    """Chunks that are counted in one turn, of a table with so many columns."""
    return max(1, _CELLS // columns)


def _step_table(view: Routing, labels: torch.Tensor, steps: range, cut: Cut) -> torch.Tensor:
    """The part of the table for `steps` of those of `cut`."""
    owners, turns = view.owners(labels.device), _turns(view, labels, steps, cut)
    return count_table(turns, owners, view.rank, view.plan.ranks, steps=len(steps))


def _turns(view: Routing, labels: torch.Tensor, steps: range, cut: Cut) -> Iterator[torch.Tensor]:
    """The labels [n, k] int64 of the tokens that `steps` of `cut` take, some at a time, as many for
    each of the steps."""
    windows, at_once = len(labels) // cut.steps, max(1, TOKENS_AT_ONCE // len(steps))
    for first in range(0, windows, at_once):
        part = range(first, min(first + at_once, windows))
        yield labels[window_positions(part, steps, cut.steps, labels.device).view(-1)].long()
    rest = labels[windows * cut.steps :][steps.start : steps.stop]
    # A token that is missing has a label behind all others, see `_count_turn`.
    nowhere = view.plan.first_instance[-1] + view.plan.ranks - view.rank - 1
    yield F.pad(rest.long(), (0, 0, 0, len(steps) - len(rest)), value=nowhere)


def count_table(
    turns: Iterable[torch.Tensor],
    owners: torch.Tensor,
    rank: int,
    ranks: int,
    *,
    steps: int,
    with_rows: bool = True,
) -> torch.Tensor:
    """[columns, steps] int32, see `Columns`, of labels [n, k] int64 that come some at a time and
    are overwritten. Positions of tokens go through the steps in turn."""
    columns = len(owners) + ranks
    table = torch.zeros(columns, steps, dtype=torch.int32, device=owners.device)
    for labels in turns:
        table += _count_turn(labels, owners, rank, ranks, steps, with_rows)
        del labels  # before the next ones are made
    return table


def _count_turn(
    labels: torch.Tensor,
    owners: torch.Tensor,
    rank: int,
    ranks: int,
    steps: int,
    with_rows: bool,
) -> torch.Tensor:
    columns = len(owners) + ranks
    # What is nowhere stays at home and counts in a column behind all others.
    ranks_of = F.pad(owners, (0, ranks - rank), value=rank).take(labels)
    table = labels.new_zeros((columns + 1, steps), dtype=torch.int32)
    if with_rows:
        turns = len(labels) // steps
        travels = visits(ranks_of, ranks, rank).view(turns, steps, ranks)
        starts = torch.searchsorted(owners, torch.arange(ranks, device=owners.device))
        starts += torch.arange(ranks, device=owners.device)
        table.index_copy_(0, starts, travels.sum(0, dtype=torch.int32).T)
        del travels
    cells = labels.add_(ranks_of).add_(1)
    del ranks_of
    if steps > 1:
        step = torch.arange(len(labels), device=labels.device) % steps
        cells = cells.mul_(steps).add_(step[:, None])
    cells = cells.flatten()
    table.view(-1).scatter_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
    return table[:columns]


@dataclass(frozen=True)
class Counted:
    """What one rank sends and receives in each step of a cut, whatever the groups of senders."""

    sent: np.ndarray
    """[ranks, steps] rows to each rank"""
    landed: np.ndarray
    """[ranks, 1 + instances, steps] rows from each rank, and its routes to each local instance"""

    @staticmethod
    def of(tables: np.ndarray, columns: Columns, rank: int) -> "Counted":
        """From the tables [ranks, columns] of all ranks, of one step."""
        mine = slice(columns.starts[rank], columns.starts[rank] + columns.widths[rank])
        return Counted(tables[rank, columns.starts, None], tables[:, mine, None])

    @staticmethod
    def joined(turns: Sequence["Counted"]) -> "Counted":
        sent, landed = ([getattr(turn, name) for turn in turns] for name in ("sent", "landed"))
        return Counted(np.concatenate(sent, -1), np.concatenate(landed, -1))

    def chunks(self, plan: DispatchPlan, cut: Cut, rank: int) -> tuple[Chunk, ...]:
        # [ranks, groups]: who sends.
        sends = np.arange(plan.ranks)[:, None] % cut.groups == np.arange(cut.groups)
        received, routes = self.landed[:, 0, :, None], self.landed[:, 1:, :, None]
        routes = routes * sends[:, None, None]
        own = routes[rank]
        landed = routes.sum(0) - own
        total = int(own.sum() + landed.sum())
        assert total == plan.loads[rank], f"{total} routes arrive of {plan.loads[rank]} planned"
        sizes = (self.sent[:, :, None] * sends[rank], received * sends[:, None], own, landed)
        by_chunk = (each.reshape(len(each), cut.chunks).T.tolist() for each in sizes)
        return tuple(
            Chunk(cut.share(number, rank), *map(tuple, chunk))
            for number, chunk in enumerate(zip(*by_chunk, strict=True))
        )
