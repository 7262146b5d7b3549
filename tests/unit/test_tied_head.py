"""The gradient of a tied head reaches the ranks that hold the embedding, whatever the groups."""

import pytest
import torch
from torch import Tensor

from flatpeak.workers.parallel import Layout
from flatpeak.workers.partition import part
from flatpeak.workers.tied_head import TiedGradient, fsdp_rows
from ranks import run_ranks

WIDTH = 3


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [1, 5, 7, 16])
def test_rows_are_cut_as_fsdp2_does(rows: int, world: int):
    chunks = list(torch.arange(rows).chunk(world))
    cut = [torch.arange(rows)[slice(*fsdp_rows(rows, world, rank))] for rank in range(world)]
    assert [len(x) for x in cut] == [len(x) for x in chunks] + [0] * (world - len(chunks))
    assert torch.equal(torch.cat(cut), torch.arange(rows))


def found(rank: int, layout: Layout, vocab: int) -> Tensor:
    """What `rank` found for its rows: numbers that no other rank has."""
    start, stop = part(vocab, layout.vocabulary, rank % layout.vocabulary)
    make = torch.Generator().manual_seed(rank)
    return torch.randn(stop - start, WIDTH, generator=make)


def shards(rank: int, cases: list[tuple[Layout, int]]) -> list[Tensor]:
    """The embedding's own gradient, ones, with that of the head, twice as in two microbatches."""
    results = []
    for layout, vocab in cases:
        tied = TiedGradient(vocab_size=vocab, layout=layout, rank=rank)
        start, stop = fsdp_rows(vocab, layout.world, rank)
        shard = torch.ones(stop - start, WIDTH)
        for _ in range(2):
            tied.take(found(rank, layout, vocab))
            tied.add_to(shard)
        results.append(shard)
    return results


@pytest.mark.parametrize("world", [1, 2, 4, 6])
def test_every_holder_gets_the_sum_over_all_ranks(world: int):
    degrees = [degree for degree in range(1, world + 1) if world % degree == 0]
    cases = [
        (Layout(world=world, vocabulary=degree), vocab)
        for degree in degrees
        for vocab in (1, 3, 5, 24, 31)
    ]
    by_case = zip(*run_ranks(world, shards, cases), strict=True)
    for (layout, vocab), held in zip(cases, by_case, strict=True):
        wanted = torch.ones(vocab, WIDTH, dtype=torch.float64)
        for rank in range(world):
            rows = slice(*part(vocab, layout.vocabulary, rank % layout.vocabulary))
            wanted[rows] += 2 * found(rank, layout, vocab)
        torch.testing.assert_close(torch.cat(held).double(), wanted, rtol=1e-6, atol=1e-6)
