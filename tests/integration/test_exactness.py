"""The whole system against a plain trainer: loss, every gradient and every weight.

Both train the same model from the same weights on the same samples. The plain trainer is
transformers, `torch.optim.AdamW` and `clip_grad_norm_` in one process; ours are W processes with
sharded experts, sequence, vocabulary and optimizer state.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec
from flatpeak.workers.data import open_samples
from flatpeak.workers.plain import PlainTrainer
from local_run import tiny_spec, train_locally
from tiny_models import tiny_content

pytestmark = pytest.mark.timeout(240)

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")
LAYOUTS = [(1, 1, 1, 1), (2, 2, 2, 2), (2, 1, 2, 1), (4, 2, 4, 2), (4, 4, 2, 4), (4, 1, 1, 4)]


def job(family: str, layout: tuple[int, int, int, int] = (1, 1, 1, 1), **sections: object) -> Spec:
    W, D, E_p, P = layout
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
    if family == "deepseek_v3":
        changes["num_key_value_heads"] = 4
    else:
        changes["output_router_logits"] = True  # asks for the auxiliary loss
    if family in ("qwen3_moe", "mixtral"):
        changes["head_dim"] = 8
    return tiny_spec(
        tiny_content(family, **changes),
        cluster={"workers": W},
        parallel={"sequence": D, "expert": E_p, "vocabulary": P},
        **sections,
    )


@dataclass
class Reference:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


@cache
def reference(family: str) -> Reference:
    spec = job(family)
    train, data = spec.train, spec.data
    source = open_samples(
        source=data.source,
        tokenizer=data.tokenizer,
        sequence_length=train.sequence_length,
        seed=train.seed,
    )
    plain = PlainTrainer(spec, source)
    plain.backward(1)
    gradients = {n: p.grad.flatten().clone() for n, p in plain.model.named_parameters()}
    plain.optimizer.zero_grad()
    steps = [plain.step(step, lr(step, train=train)) for step in range(1, train.steps + 1)]
    return Reference(
        losses=[loss for loss, _ in steps],
        norms=[norm for _, norm in steps],
        gradients=gradients,
        parameters={n: p.detach().flatten() for n, p in plain.model.named_parameters()},
    )


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, by parameter."""
    return {
        name: ((found[name] - value).norm() / value.norm().clamp(min=1e-12)).item()
        for name, value in wanted.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "W{} D{} E{} P{}".format(*x))
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_a_plain_trainer(family: str, layout: tuple[int, ...], tmp_path: Path):
    wanted = reference(family)
    outcome = train_locally(job(family, layout), tmp_path)
    losses = [result.loss for result in outcome.results]
    assert losses == pytest.approx(wanted.losses, abs=1e-5)
    assert [result.grad_norm for result in outcome.results] == pytest.approx(wanted.norms, rel=1e-4)
    assert outcome.gradients.keys() >= wanted.gradients.keys()
    assert max(relative(outcome.gradients, wanted.gradients).values()) < 1e-5
    assert max(relative(outcome.parameters, wanted.parameters).values()) < 1e-4
