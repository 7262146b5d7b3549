"""Reading and refusing model configurations, and finding the parts of a model."""

import json

import pytest
import torch

from flatpeak.workers.checkpoint import (
    attention_heads,
    build_meta_model,
    hidden_size,
    kept_in_fp32,
    kv_heads,
    load_config,
    moe_layers,
    num_experts,
    router_modules,
    vocab_size,
)
from flatpeak.workers.errors import CheckpointError, SpecError
from tiny_models import FAMILIES, tiny_config, tiny_content

TINY_LLAMA = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_and_a_mapping_give_the_same_sizes(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps(tiny_content(family)))
    from_path = load_config(path=str(tmp_path), config=None)
    from_mapping = load_config(path=None, config=tiny_content(family))
    assert from_path.to_dict() == from_mapping.to_dict()
    assert num_experts(from_path) == 4
    assert attention_heads(from_path) == 2
    assert kv_heads(from_path) == (2 if family == "deepseek_v3" else 1)
    assert vocab_size(from_path) == 50
    assert hidden_size(from_path) == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"model_type": "qwen3_mo"}, "did you mean qwen3_moe", id="misspelt family"),
        pytest.param({"model_type": None}, "unknown model_type 'None'", id="null family"),
        pytest.param({"hidden_size": "wide"}, "hidden_size", id="size of the wrong type"),
        pytest.param(
            {"rms_norm_epsi": 1e-5},
            "^model.config: qwen3_moe has no setting 'rms_norm_epsi', the nearest is "
            "'rms_norm_eps'. Correct",
            id="misspelt key",
        ),
        pytest.param(
            {"num_layers": 4, "hidden_dim": 8},
            "'num_layers', the nearest is 'num_hidden_layers'; no setting 'hidden_dim', the",
            id="keys of another family",
        ),
        pytest.param(
            {"num_expert": 8, "num_experts": 4}, "'num_expert', the", id="beside the right one"
        ),
        pytest.param(
            {"rope_parameters": {"rope_typ": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "'rope_parameters.rope_typ', the nearest is 'rope_parameters.rope_type'",
            id="misspelt key of a mapping",
        ),
        pytest.param({"num_experts": 0}, "Qwen3MoeConfig .* not a Mixture-of", id="no experts"),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8"}}, "quantised by fp8", id="quantised"
        ),
        pytest.param({"model_type": "vit"}, "ViTConfig .* no causal language", id="vision family"),
        pytest.param(
            {"hidden_size": 0},
            "^model.config: hidden_size = 0 should be an integer from 1 to 2147483647$",
            id="no width",
        ),
        pytest.param({"vocab_size": -5}, "vocab_size = -5 should be", id="negative size"),
        pytest.param({"head_dim": 0}, "head_dim = 0 should be", id="no head width"),
        pytest.param({"num_key_value_heads": 0}, "num_key_value_heads = 0", id="no groups"),
        pytest.param({"moe_intermediate_size": 0}, "moe_intermediate_size = 0", id="no expert"),
        pytest.param({"hidden_size": 10**30}, "hidden_size = 10+ should", id="huge size"),
        pytest.param(
            {"num_hidden_layers": 10**7}, "= 10000000 .* from 1 to 10000$", id="huge depth"
        ),
        pytest.param(
            {"rope_theta": 0}, "rope_theta = 0 should .* for example 10000.0", id="no base"
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
            "rope_theta = -1.0 should be a number of at least 1",
            id="negative base",
        ),
        pytest.param(
            {"dtype": "int8"},
            "^model.config: dtype = 'int8' is no dtype to train; use one of float32, bfloat16",
            id="whole numbers",
        ),
        pytest.param({"torch_dtype": 16}, "torch_dtype = 16 is no dtype", id="dtype by number"),
        pytest.param({"quantization_config": "fp8"}, "no attribute", id="quantised by a word"),
    ],
)
def test_a_bad_mapping_is_a_spec_error_that_says_what_to_mend(changes, message):
    with pytest.raises(SpecError, match=message):
        load_config(path=None, config=tiny_content("qwen3_moe", **changes))


def test_a_dense_family_is_refused_by_the_class_that_was_found():
    with pytest.raises(SpecError, match=r"LlamaConfig .* not a Mixture-of-Experts model"):
        load_config(path=None, config={"model_type": "llama"})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_configuration_writes_of_itself_is_accepted_inline(family: str):
    content = tiny_config(family).to_dict()
    assert load_config(path=None, config=content).to_dict() == content


def test_keys_that_are_no_fields_but_are_read_are_accepted():
    old = {"rope_theta": 5e5, "torch_dtype": "bfloat16", "num_local_experts": 4}
    read_by_the_model = {"head_dim": 4, "output_router_logits": True}
    content = tiny_content("qwen3_moe", **old, **read_by_the_model)
    config = load_config(path=None, config=content)
    assert config.rope_parameters["rope_theta"] == 5e5
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    load_config(path=None, config=tiny_content("mixtral", rope_scaling=yarn))


def test_keys_that_only_published_files_have_are_accepted_in_files(tmp_path):
    content = tiny_content("mixtral", rope_theta=5e5, ep_size=1, moe_intermediate_size=16)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert load_config(path=str(tmp_path), config=None).rope_parameters["rope_theta"] == 5e5
    with pytest.raises(SpecError, match="no setting 'ep_size'"):
        load_config(path=None, config=content)


def test_a_mapping_without_a_family_says_so():
    with pytest.raises(SpecError, match="`model_type` is missing"):
        load_config(path=None, config={"hidden_size": 16})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "holds no config.json", id="no file"),
        pytest.param('{"model_type": ', "is not JSON", id="cut off"),
        pytest.param("[1, 2]", "holds a list", id="not an object"),
        pytest.param('{"model_type": "mixtrall"}', "did you mean mixtral", id="unknown family"),
        pytest.param('{"model_type": "llama"}', "LlamaConfig", id="dense family"),
        pytest.param(
            '{"model_type": "mixtral", "torch_dtype": "bfloat17"}',
            r"config.json: torch_dtype = 'bfloat17' is no dtype to train; use one of float32",
            id="misspelt dtype",
        ),
        pytest.param(
            '{"model_type": "mixtral", "rope_theta": 0}', "rope_theta = 0 should", id="no base"
        ),
        pytest.param('{"a": ' * 20_000 + "1" + "}" * 20_000, "is not JSON", id="too deep"),
        pytest.param('{"a": ' + "9" * 5000 + "}", "is not JSON", id="too many digits"),
    ],
)
def test_a_bad_directory_is_a_checkpoint_error_that_names_the_file(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        load_config(path=str(tmp_path), config=None)
    assert str(tmp_path) in str(error.value)


def test_a_missing_directory_is_not_looked_for_elsewhere(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        load_config(path=str(tmp_path / "Qwen/Qwen3-30B-A3B"), config=None)


@pytest.mark.parametrize(
    ("path", "config", "found"),
    [(None, None, "neither"), ("/m", {"model_type": "mixtral"}, "both")],
    ids=["neither", "both"],
)
def test_the_model_comes_from_exactly_one_place(path, config, found):
    with pytest.raises(SpecError, match=f"exactly one .* {found} were given"):
        load_config(path=path, config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_routers_are_found_in_layer_order_on_the_meta_device(family):
    model = build_meta_model(tiny_config(family))
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}
    layers = [1] if family == "deepseek_v3" else [0, 1]
    router = "router" if family == "gpt_oss" else "gate"
    experts, routers = moe_layers(model), router_modules(model)
    assert [name for name, _ in experts] == [f"model.layers.{i}.mlp.experts" for i in layers]
    assert [name for name, _ in routers] == [f"model.layers.{i}.mlp.{router}" for i in layers]
    assert all(module is model.get_submodule(name) for name, module in experts + routers)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_meta_model_shares_embedding_and_head_only_if_tied(family, tied):
    model = build_meta_model(tiny_config(family, tie_word_embeddings=tied))
    shared = model.get_parameter("lm_head.weight") is model.get_input_embeddings().weight
    assert shared is tied


def test_sizes_that_make_no_model_are_a_spec_error():
    config = tiny_config("qwen3_moe", hidden_act="no_such_activation")
    with pytest.raises(SpecError, match=r"cannot be built: .*no_such_activation"):
        build_meta_model(config)


def test_a_dense_model_with_a_stray_expert_count_is_refused_once_built(tmp_path):
    content = {"model_type": "llama", "num_experts": 4, **TINY_LLAMA}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = load_config(path=str(tmp_path), config=None)
    with pytest.raises(SpecError, match="LlamaForCausalLM has 1 layers and none"):
        build_meta_model(config)


def test_a_model_whose_layers_are_all_dense_is_refused():
    with pytest.raises(SpecError, match="none of them has routed experts"):
        build_meta_model(tiny_config("qwen3_moe", mlp_only_layers=[0, 1]))


def test_deepseek_keeps_its_router_in_fp32_and_gpt_oss_its_norms_only_beside_fp16():
    deepseek = build_meta_model(tiny_config("deepseek_v3"))
    router = "model.layers.1.mlp.gate"
    assert kept_in_fp32(deepseek) == {f"{router}.weight", f"{router}.e_score_correction_bias"}
    gpt_oss = build_meta_model(tiny_config("gpt_oss"))
    assert kept_in_fp32(gpt_oss) == set()
    assert "model.norm.weight" in kept_in_fp32(gpt_oss, torch.float16)
    assert kept_in_fp32(build_meta_model(tiny_config("mixtral"))) == set()
