"""Parallel layouts: packed documents over Ulysses, few key-value heads, odd worlds, a resize."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.controller.spec import Spec
from flatpeak.workers.attention import packed_attention
from flatpeak.workers.batches import microbatch
from flatpeak.workers.data import Sample
from flatpeak.workers.errors import DataError, SpecError
from flatpeak.workers.parallel import Axis, Groups, Layout
from local_run import (
    VOCABULARY,
    LocalRun,
    Outcome,
    Rows,
    documents_alone,
    furthest,
    job,
    make_sample,
    tiny_spec,
    train_locally,
    train_plainly,
)
from ranks import run_ranks
from tiny_models import tiny_content

pytestmark = pytest.mark.timeout(240)

QUIET = {"peaks": False}
ONE_LAYER = {"num_hidden_layers": 1, "output_router_logits": False}


def named(layout: tuple[int, ...]) -> str:
    return "W{} D{} E{} P{}".format(*layout)


DOCUMENTS = {
    "five documents": [9, 1, 6, 5, 3],
    "seven and three": [7, 3],
    "a border at the cut": [4, 4],
}


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 2, 1, 1), (4, 2, 2, 2)], ids=named)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_packed_documents_stay_apart_whatever_the_sequence_degree(
    lengths: list[int], layout: tuple[int, ...], tmp_path: Path
):
    rows = Rows([make_sample(n, lengths) for n in range(2)])
    train = {"steps": 1, "sequences_per_step": 2, "sequence_length": sum(lengths)}
    spec = job("qwen3_moe", layout, train=train, model=ONE_LAYER, metrics=QUIET)
    outcome, alone = train_locally(spec, tmp_path, source=rows), documents_alone(spec, rows.rows)
    assert outcome.losses == pytest.approx(alone.losses, abs=1e-6)
    assert furthest(outcome.gradients, alone.gradients) < 1e-5


def test_a_length_that_the_sequence_degree_does_not_divide_is_refused_before_any_rank_starts():
    with pytest.raises(SpecError, match=r"2999 .*2996 or 3000"):
        job("qwen3_moe", (4, 4, 1, 1), train={"sequence_length": 2999})


def groups_of_two() -> Groups:
    alone = {"group": None, "replica": 0, "replica_ranks": (0, 1), "replica_group": None}
    single = Axis(degree=1, index=0, **alone)
    pair = Axis(degree=2, index=0, **alone)
    return Groups(
        layout=Layout(world=2, sequence=2), rank=0, sequence=pair, expert=single, vocabulary=single
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [([[7]], "7 tokens .* 2"), ([[8], [6]], "6 and 8 tokens")],
    ids=["odd over two ranks", "uneven rows"],
)
def test_rows_that_would_lose_tokens_are_refused(rows: list[list[int]], message: str):
    samples = [make_sample(n, documents) for n, documents in enumerate(rows)]
    with pytest.raises(DataError, match=message):
        microbatch(samples, groups_of_two(), torch.device("cpu"))


WORLDS = {
    "one key-value head on four ranks": ((4, 4, 2, 2), {"num_key_value_heads": 1}),
    "two key-value heads on four ranks": ((4, 4, 4, 1), {"num_key_value_heads": 2}),
    "six heads on three ranks": (
        (3, 3, 3, 3),
        {"num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    "three ranks with a sequence each": ((3, 1, 3, 1), {}),
    "three ranks with replicated experts": ((3, 3, 1, 1), {"num_attention_heads": 3}),
}


@pytest.mark.parametrize("world", WORLDS)
def test_odd_worlds_and_few_key_value_heads_equal_a_plain_trainer(world: str, tmp_path: Path):
    layout, model = WORLDS[world]
    if model.get("num_attention_heads") == 3:
        model = model | {"num_key_value_heads": 1}
    train = {"steps": 2, "sequences_per_step": 3 if layout[0] == 3 else 2, "sequence_length": 12}
    spec = job("qwen3_moe", layout, model=model, train=train, metrics=QUIET)
    outcome, plain = train_locally(spec, tmp_path), train_plainly(spec)
    assert outcome.losses == pytest.approx(plain.losses, abs=1e-5)
    assert furthest(outcome.gradients, plain.gradients) < 1e-5
    assert furthest(outcome.parameters, plain.parameters) < 1e-4


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...], window: int | None
) -> Tensor:
    """softmax(q k^T) v with one T x T mask: causal, of one document, of the last `window` keys."""
    T, repeats = q.shape[2], q.shape[1] // k.shape[1]
    document = torch.zeros(T, dtype=torch.int64)
    for number, (start, stop) in enumerate(pairwise(offsets)):
        document[start:stop] = number
    age = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    seen = (age >= 0) & (document[:, None] == document[None, :])
    if window is not None:
        seen &= age < window
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = (q @ k.mT * 0.3).masked_fill(~seen, -torch.inf)
    return scores.softmax(dim=-1) @ v


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 30], ids=lambda w: f"window {w}")
@pytest.mark.parametrize(
    "offsets", [(0, 20), (0, 3, 4, 20), (0, 11, 20)], ids=["one", "three", "two"]
)
def test_windowed_attention_of_packed_documents_equals_a_dense_mask(
    offsets: tuple[int, ...], window: int | None
):
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 20, 8), (1, 2, 20, 8), (1, 2, 20, 6)  # values narrower than keys, as in MLA
    ours = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    dense = [x.clone() for x in ours]
    for x in (*ours, *dense):
        x.requires_grad_()
    q, k, v = ours
    found = packed_attention(q, k, v, boundaries=[offsets], scale=0.3, window=window)
    wanted = masked_attention(dense[0], dense[1], dense[2], offsets, window)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    found.backward(upstream)
    wanted.backward(upstream)
    for x, y in zip(ours, dense, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 2, 2, 2)], ids=named)
def test_a_model_with_a_sliding_window_equals_a_plain_trainer(
    layout: tuple[int, ...], tmp_path: Path
):
    rows = Rows([make_sample(n, [13, 3]) for n in range(2)])
    spec = job(
        "mixtral",
        layout,
        model={"sliding_window": 4},
        train={"steps": 1, "sequences_per_step": 2, "sequence_length": 16},
        metrics=QUIET,
    )
    outcome, plain = train_locally(spec, tmp_path, source=rows), train_plainly(spec, source=rows)
    assert outcome.losses == pytest.approx(plain.losses, abs=1e-5)
    assert furthest(outcome.gradients, plain.gradients) < 1e-5


def test_a_window_that_a_family_puts_in_its_mask_alone_is_kept(tmp_path: Path):
    rows = Rows([make_sample(n, [13, 3]) for n in range(2)])
    content = {
        **tiny_content("qwen3_moe", vocab_size=VOCABULARY),
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 16,
        "sliding_window": 4,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "sliding_attention"],
    }
    del content["head_dim"]
    train = {"steps": 1, "sequences_per_step": 2, "sequence_length": 16}
    alone = {"sequence": 1, "expert": 1, "vocabulary": 1}
    spec = tiny_spec(content, train=train, parallel=alone, metrics=QUIET)
    outcome, plain = train_locally(spec, tmp_path, source=rows), train_plainly(spec, source=rows)
    assert outcome.losses == pytest.approx(plain.losses, abs=1e-5)
    assert furthest(outcome.gradients, plain.gradients) < 1e-5


class Recording:
    """A source that remembers what was asked of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def sample(self, index: int) -> Sample:
        self.read.append(index)
        return make_sample(index, [12])


def train_and_record(
    rank: int, spec: Spec, folder: str, after: Outcome | None
) -> tuple[Outcome, list[int]]:
    source = Recording()
    return LocalRun(rank, spec, folder, source=source, after=after).train(), source.read


def test_a_resize_reads_no_sample_twice_keeps_the_rates_and_equals_a_plain_run(tmp_path: Path):
    def part(layout: tuple[int, ...], steps: int) -> Any:
        train = {
            "steps": steps,
            "sequences_per_step": 6,
            "sequence_length": 12,
            "schedule": {"warmup_steps": 1, "decay_steps": 4},
        }
        return job("qwen3_moe", layout, train=train, metrics=QUIET)

    before = run_ranks(2, train_and_record, part((2, 1, 2, 2), 2), str(tmp_path), None)
    after = run_ranks(3, train_and_record, part((3, 1, 3, 1), 4), str(tmp_path), before[0][0])
    read = [ids for _, ids in before + after]
    # The uneven split puts a step's samples on ranks in order, so each rank's are known.
    assert read[:2] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert sorted(i for ids in read for i in ids) == list(range(24))
    plain = train_plainly(part((1, 1, 1, 1), 4), source=Recording())
    assert before[0][0].losses + after[0][0].losses == pytest.approx(plain.losses, abs=1e-5)
    assert furthest(after[0][0].parameters, plain.parameters) < 1e-4
