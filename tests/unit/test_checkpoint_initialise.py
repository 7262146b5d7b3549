"""Random weights: the same whatever the cut, and of the family's own law."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from flatpeak.workers.checkpoint import RandomInit, build_meta_model, load_config
from flatpeak.workers.errors import CheckpointError
from tiny_models import FAMILIES, tiny_config


def read_all(source: RandomInit, model) -> dict[str, torch.Tensor]:
    return {name: source.read(name, 0, t.shape[0]) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rows_are_the_same_whatever_the_cut_and_the_order_of_reading(family, data):
    model = build_meta_model(tiny_config(family))
    whole = read_all(RandomInit(model, seed=3), model)
    cut = RandomInit(model, seed=3)
    for name in data.draw(st.permutations(sorted(whole)))[:12]:
        rows = whole[name].shape[0]
        start = data.draw(st.integers(0, rows))
        stop = data.draw(st.integers(start, rows))
        assert torch.equal(cut.read(name, start, stop), whole[name][start:stop]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_values_follow_the_law_of_the_family(family):
    config = tiny_config(family, initializer_range=0.3)
    theirs = AutoModelForCausalLM.from_config(config).state_dict()
    model = build_meta_model(config)
    for name, ours in read_all(RandomInit(model, seed=0), model).items():
        assert ours.dtype == torch.float32
        assert ours.shape == theirs[name].shape
        if theirs[name].unique().numel() == 1:
            assert torch.equal(ours, theirs[name]), name
        else:
            # Five standard errors; that of a deviation from n normal draws is std / sqrt(2 n).
            assert abs(ours.std() - 0.3) < 5 * 0.3 / math.sqrt(2 * ours.numel()), name
            assert abs(ours.mean()) < 5 * 0.3 / math.sqrt(ours.numel()), name


def test_a_router_whose_law_is_that_of_the_block_around_it_gets_it():
    config = load_config(
        path=None,
        config={
            "model_type": "qwen3_next",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_experts": 16,
            "moe_intermediate_size": 4,
            "vocab_size": 8,
            "initializer_range": 0.3,
        },
    )
    source = RandomInit(build_meta_model(config), seed=0)
    weight = source.read("model.layers.0.mlp.gate.weight", 0, 16)
    assert abs(weight.std() - 0.3) < 5 * 0.3 / math.sqrt(2 * weight.numel())


def test_every_random_tensor_every_expert_and_every_seed_has_values_of_its_own():
    model = build_meta_model(tiny_config("qwen3_moe"))
    drawn = []
    for seed in (0, 1):
        for tensor in read_all(RandomInit(model, seed=seed), model).values():
            rows = tensor.flatten(1) if tensor.dim() == 3 else tensor.reshape(1, -1)
            drawn += [row[:16] for row in rows if row.unique().numel() > 1]
    heads = torch.stack(drawn)
    assert len(heads) > 2 * 2 * 8
    assert heads.unique(dim=0).shape == heads.shape


def test_the_head_of_a_tied_model_is_its_embedding():
    model = build_meta_model(tiny_config("olmoe", tie_word_embeddings=True))
    source = RandomInit(model, seed=0)
    embedding = source.read("model.embed_tokens.weight", 0, 50)
    assert torch.equal(source.read("lm_head.weight", 10, 20), embedding[10:20])


def test_drawing_leaves_the_generator_of_the_process_alone():
    model = build_meta_model(tiny_config("mixtral"))
    before = torch.get_rng_state()
    RandomInit(model, seed=0).read("lm_head.weight", 0, 50)
    assert torch.equal(torch.get_rng_state(), before)


def test_slicing_the_model_afterwards_changes_nothing():
    model = build_meta_model(tiny_config("mixtral"))
    names = ["model.layers.0.mlp.experts.down_proj", "lm_head.weight"]
    before, source = RandomInit(model, seed=0), RandomInit(model, seed=0)
    expected = [before.read(name, 2, 4) for name in names]
    for name in names:
        module_name, _, attribute = name.rpartition(".")
        sliced = nn.Parameter(model.get_parameter(name)[2:4, :1])
        setattr(model.get_submodule(module_name), attribute, sliced)
    for name, rows in zip(names, expected, strict=True):
        assert torch.equal(source.read(name, 2, 4), rows)


def test_what_was_read_belongs_to_the_caller():
    model = build_meta_model(tiny_config("mixtral"))
    source = RandomInit(model, seed=0)
    for name in ("model.norm.weight", "model.layers.0.mlp.experts.down_proj"):
        first = source.read(name, 0, 4).clone()
        source.read(name, 0, 4).zero_()
        assert torch.equal(source.read(name, 0, 4), first)


def test_a_parameter_the_family_has_no_law_for_is_an_error():
    model = build_meta_model(tiny_config("mixtral"))
    model.model.layers[0].scale = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(CheckpointError, match=r"no initialisation law for model\.layers\.0\.scale"):
        RandomInit(model, seed=0).read("model.layers.0.scale", 0, 3)
