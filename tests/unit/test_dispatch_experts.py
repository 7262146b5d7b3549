"""Products of several experts as one kernel, which CUDA has for bf16, equal those one by one."""

import pytest
import torch
from torch import nn

from flatpeak.workers.dispatch.experts import (
    Gradients,
    HeldExperts,
    Projections,
    expert_backward,
    expert_forward,
    read_layout,
)
from flatpeak.workers.dispatch.rows import Block
from moe_families import FAMILIES

HIDDEN, INTERMEDIATE, NATIVES, FOREIGN = 32, 24, 5, 3
HALF = torch.bfloat16


def make(family: str, experts: int, seed: int) -> nn.Module:
    module = FAMILIES[family].make(experts, hidden=HIDDEN, intermediate=INTERMEDIATE)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.2).to(HALF)
    return module.requires_grad_(False)


def block_of(sizes: dict[int, int]) -> Block:
    """A block with so many routes of each instance, rows in their order."""
    routes = torch.arange(sum(sizes.values()))
    runs = tuple((True, size) for size in sizes.values())
    return Block(routes, routes, routes, tuple(sizes), tuple(sizes.values()), runs)


class Grouped:
    """Says yes, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> bool:
        self.asked += 1
        return True


BLOCKS = {
    "all native": {0: 9, 1: 1, 2: 30, 3: 4, 4: 7},
    "natives with gaps": {1: 12, 4: 5},
    "foreign": {5: 6, 6: 11, 7: 2},
    "foreign with a gap": {5: 3, 7: 8},
}


@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "nemotron-h"])
def test_grouped_products_equal_products_one_by_one(family: str, sizes: dict[int, int]):
    native, foreign = make(family, NATIVES, 0), make(family, FOREIGN, 1)
    layout = read_layout(native)
    held = HeldExperts(
        [native.get_parameter(name) for name in layout.names],
        [foreign.get_parameter(name) for name in layout.names],
    )
    block, always = block_of(sizes), Grouped()
    generator = torch.Generator().manual_seed(2)
    x, upstream = torch.randn(2, len(block.rows), HIDDEN, generator=generator).to(HALF)
    scale = torch.rand(len(block.rows), 1, generator=generator)

    def run(projections: Projections) -> list[torch.Tensor]:
        sums = [
            [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
            for weights in (held.natives, held.foreign)
        ]
        gradients = Gradients(layout, HeldExperts(*sums))
        value = expert_forward(projections, block, x.clone(), scale)
        d_x, d_scale = expert_backward(
            projections, gradients, block, x=x.clone(), upstream=upstream, scale=scale
        )
        gradients.finish()
        return [value, d_x, d_scale, *sums[0], *sums[1]]

    one_by_one = run(Projections(layout, held, HALF))
    together = run(Projections(layout, held, HALF, grouped=always))
    assert always.asked == 5
    for ours, want in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(ours, want)
