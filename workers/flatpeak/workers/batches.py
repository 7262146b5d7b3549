"""Which tokens of a step belong to this rank, as tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flatpeak.workers.data import Sample, sample_ids, share_of
from flatpeak.workers.errors import DataError
from flatpeak.workers.parallel import Groups


class SampleSource(Protocol):
    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """B rows of which this rank holds s = T / D consecutive tokens each; tensors [B, s] int64."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    boundaries: list[tuple[int, ...]]

    @property
    def tokens(self) -> int:
        return self.inputs.numel()


def microbatch(samples: list[Sample], groups: Groups, device: torch.device) -> Microbatch:
    """This rank's part of the rows, which have one length that the sequence degree divides.

    Microbatches may differ in length, also between ranks. Raises `DataError` for other rows.
    """
    lengths = sorted({len(sample.inputs) for sample in samples})
    if len(lengths) > 1:
        raise DataError(
            f"a microbatch has rows of {lengths[0]} and {lengths[-1]} tokens; pack documents into "
            "rows of train.sequence_length, or take one row a microbatch"
        )
    length, rest = divmod(lengths[0], groups.sequence.degree)
    if rest:
        raise DataError(
            f"a row of {lengths[0]} tokens cannot be cut over {groups.sequence.degree} ranks; give "
            f"rows of {length * groups.sequence.degree} tokens or set parallel.sequence to 1"
        )
    start = groups.sequence.index * length

    def stack(name: str) -> Tensor:
        rows = [getattr(sample, name)[start : start + length] for sample in samples]
        return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)

    return Microbatch(
        inputs=stack("inputs"),
        targets=stack("targets"),
        positions=stack("positions"),
        boundaries=[sample.boundaries for sample in samples],
    )


def read_step(
    source: SampleSource,
    *,
    step: int,
    sequences: int,
    microbatches: int,
    groups: Groups,
    device: torch.device,
) -> Iterator[Microbatch]:
    """The microbatches of `step` (from 1) on this rank.

    The samples of a step depend on its number alone; sequence groups take consecutive runs of them.
    """
    ids = share_of(
        sample_ids(step - 1, sequences),
        count=groups.layout.data,
        index=groups.rank // groups.layout.sequence,
    )
    rows = len(ids) // microbatches
    for index in range(microbatches):
        chosen = ids[index * rows : (index + 1) * rows]
        yield microbatch([source.sample(i) for i in chosen], groups, device)
