"""Tiny experts modules of several families, their dense results, and routing profiles for tests."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace

import torch
from torch import nn

from flatpeak.workers.partition import part

HIDDEN, INTERMEDIATE = 12, 10


class PlainExperts(nn.Module):
    """Gated experts in the layout of transformers, without the seconds that its import costs every
    rank; computes densely by itself, as the families' eager forward does."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(
        self, experts: int, *, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE
    ) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.act_fn = nn.SiLU()
        self.config = SimpleNamespace()

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = torch.where(ids == expert)
            inner = self._apply_gate(hidden[token] @ self.gate_up_proj[expert].T)
            value = (inner @ self.down_proj[expert].T) * weights[token, slot, None]
            output = output.index_add(0, token, value)
        return output


@dataclass(frozen=True)
class Family:
    model: str
    config: str
    experts: str
    intermediate_key: str
    experts_key: str
    others: dict[str, int | float] = field(default_factory=dict)

    def make(
        self, experts: int, *, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE
    ) -> nn.Module:
        sizes = {self.intermediate_key: intermediate, self.experts_key: experts, **self.others}
        config = getattr(import_module("transformers"), self.config)(hidden_size=hidden, **sizes)
        modeling = import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        return getattr(modeling, self.experts)(config)


FAMILIES = {
    "qwen3-moe": Family(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeExperts",
        "moe_intermediate_size",
        "num_experts",
    ),
    "mixtral": Family(
        "mixtral",
        "MixtralConfig",
        "MixtralExperts",
        "intermediate_size",
        "num_local_experts",
    ),
    "olmoe": Family(
        "olmoe",
        "OlmoeConfig",
        "OlmoeExperts",
        "intermediate_size",
        "num_experts",
    ),
    "deepseek-v3": Family(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3Experts",
        "moe_intermediate_size",
        "n_routed_experts",
    ),
    # Biases, transposed and interleaved weights, a clamped gate.
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssConfig",
        "GptOssExperts",
        "intermediate_size",
        "num_local_experts",
        {"swiglu_limit": 1.0},
    ),
    # No gate.
    "nemotron-h": Family(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHExperts",
        "moe_intermediate_size",
        "n_routed_experts",
    ),
}


def make_experts(family: str, experts: int, *, seed: int = 0) -> nn.Module:
    """All experts with random weights, the same for every caller."""
    module = PlainExperts(experts) if family == "plain" else FAMILIES[family].make(experts)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
    module.config._experts_implementation = "eager"
    return module


def slice_of(module: nn.Module, rank: int, ranks: int) -> nn.Module:
    """One rank's slice of all experts; `num_experts` stays global."""
    local = copy.deepcopy(module)
    start, stop = part(module.num_experts, ranks, rank)  # type: ignore[arg-type]
    for parameter in local.parameters():
        parameter.data = parameter.data[start:stop].clone()
    return local


@dataclass
class Tokens:
    """One rank's input: hidden [N, H], ids and weights [N, k], and the gradient of the output."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    upstream: torch.Tensor

    def leaves(self) -> "Tokens":
        hidden, weights = (t.clone().requires_grad_() for t in (self.hidden, self.weights))
        return Tokens(hidden, self.ids, weights, self.upstream)


def make_tokens(ids: torch.Tensor, *, seed: int = 1) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    count, k = ids.shape
    hidden, upstream = torch.randn(2, count, HIDDEN, generator=generator).unbind(0)
    weights = torch.rand(count, k, generator=generator) + 0.1
    return Tokens(hidden, ids, weights / weights.sum(-1, keepdim=True), upstream)


def join(tokens: list[Tokens]) -> Tokens:
    names = ("hidden", "ids", "weights", "upstream")
    return Tokens(*(torch.cat([getattr(t, name) for t in tokens]) for name in names))


def profile(tokens: int, experts: int, k: int, hot_percent: int, hot: int) -> torch.Tensor:
    """Expert ids [tokens, k]: the first `hot_percent` of tokens choose among `hot` experts, the
    others walk the cold ones; balanced at zero."""
    i, j = torch.arange(tokens)[:, None], torch.arange(k)[None, :]
    if hot_percent == 0:
        return (i + j) % experts
    cold = hot + (i + j) % (experts - hot)
    return torch.where(i < tokens * hot_percent // 100, (j % hot).expand(tokens, k), cold)


def random_ids(tokens: int, experts: int, k: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(dim=-1)[:, :k].contiguous()


@dataclass
class Results:
    """An output and every gradient; parameter gradients by name, of whichever slice was run."""

    output: torch.Tensor
    hidden: torch.Tensor
    weights: torch.Tensor
    parameters: dict[str, torch.Tensor]


def results_of(
    module: nn.Module, tokens: Tokens, forward: Callable[[nn.Module, Tokens], torch.Tensor]
) -> Results:
    tokens = tokens.leaves()
    output = forward(module, tokens)
    output.backward(tokens.upstream)
    assert tokens.hidden.grad is not None
    assert tokens.weights.grad is not None
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Results(output.detach(), tokens.hidden.grad, tokens.weights.grad, gradients)


def dense_results(module: nn.Module, tokens: Tokens) -> Results:
    """The module's own eager forward over all experts and tokens."""
    module = copy.deepcopy(module)
    return results_of(module, tokens, lambda m, t: m(t.hidden, t.ids, t.weights))


def assert_equals_dense(module: nn.Module, tokens: list[Tokens], ranks: list[Results]) -> None:
    """The ranks' results, put together, equal the dense ones to 1e-5 of their largest entry."""
    dense = dense_results(module, join(tokens))
    for name in ("output", "hidden", "weights"):
        assert_close(torch.cat([getattr(r, name) for r in ranks]), getattr(dense, name), name)
    for name, gradient in dense.parameters.items():
        assert_close(torch.cat([r.parameters[name] for r in ranks]), gradient, name)


def assert_close(ours: torch.Tensor, dense: torch.Tensor, what: str, tolerance: float = 1e-5):
    assert ours.shape == dense.shape, what
    assert ours.isfinite().all(), f"{what} is not finite"
    if dense.numel():
        error = (ours.double() - dense.double()).abs().max().item()
        scale = dense.double().abs().max().item()
        assert error <= tolerance * scale, f"{what}: error {error:.3g} of {scale:.3g}"
