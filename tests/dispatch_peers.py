"""What the ranks of a layer tell each other, recorded once and told one of them again."""

from collections.abc import Sequence

import numpy as np
import torch

from flatpeak.workers.dispatch.peers import Together


class Recorder(Together):
    """All ranks in one process; `made` has what each of them got, round by round."""

    def __init__(self) -> None:
        self.made: list[list[np.ndarray]] = []

    def gather(self, rows: list[torch.Tensor]) -> np.ndarray:
        gathered = super().gather(rows)
        self.made.append([gathered] * len(rows))
        return gathered

    def deal(self, tables: list[torch.Tensor], widths: Sequence[int]) -> list[np.ndarray]:
        self.made.append(super().deal(tables, widths))
        return self.made[-1]


class Replay:
    """The peers of one rank that is alone; starts over after the last round."""

    def __init__(self, rank: int, made: list[list[np.ndarray]]) -> None:
        self.rounds = 0
        self._rank, self._made = rank, made

    def gather(self, rows: list[torch.Tensor]) -> np.ndarray:
        return self._next()

    def deal(self, tables: list[torch.Tensor], widths: Sequence[int]) -> list[np.ndarray]:
        return [self._next()]

    def _next(self) -> np.ndarray:
        self.rounds += 1
        return self._made[(self.rounds - 1) % len(self._made)][self._rank]
