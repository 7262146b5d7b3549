"""The whole system against a plain trainer: loss, every gradient and every weight.

Both train the same model from the same weights on the same samples. The plain trainer is
transformers, `torch.optim.AdamW` and `clip_grad_norm_` in one process; ours are W processes with
sharded experts, sequence, vocabulary and optimizer state.
"""

from functools import cache
from pathlib import Path

import pytest

from local_run import Reference, job, relative, train_locally, train_plainly

pytestmark = pytest.mark.timeout(240)

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")
LAYOUTS = [(1, 1, 1, 1), (2, 2, 2, 2), (2, 1, 2, 1), (4, 2, 4, 2), (4, 4, 2, 4), (4, 1, 1, 4)]


@cache
def reference(family: str) -> Reference:
    return train_plainly(job(family))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "W{} D{} E{} P{}".format(*x))
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_a_plain_trainer(family: str, layout: tuple[int, ...], tmp_path: Path):
    wanted = reference(family)
    outcome = train_locally(job(family, layout), tmp_path)
    assert outcome.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert outcome.norms == pytest.approx(wanted.norms, rel=1e-4)
    assert outcome.gradients.keys() >= wanted.gradients.keys()
    assert max(relative(outcome.gradients, wanted.gradients).values()) < 1e-5
    assert max(relative(outcome.parameters, wanted.parameters).values()) < 1e-4
