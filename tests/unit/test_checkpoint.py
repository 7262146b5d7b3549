"""HF -> ours -> HF, bit for bit, against what `save_pretrained` writes and `from_pretrained` loads.

Expert matrices are square (hidden == intermediate), so that a transposition cannot hide in a shape.
"""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from flatpeak.workers.checkpoint import (
    CheckpointReader,
    build_meta_model,
    export_checkpoint,
    load_config,
)
from flatpeak.workers.errors import CheckpointError
from tiny_models import FAMILIES, tiny_config

LAYOUTS = [pytest.param(True, id="per-expert"), pytest.param(False, id="fused")]
TIES = [pytest.param(True, id="tied"), pytest.param(False, id="untied")]


def saved_model(
    directory: Path, family: str, *, tied: bool = False, original: bool = True, **save
) -> PreTrainedModel:
    """A model with every element distinct, as `save_pretrained` leaves it in `directory`."""
    config = tiny_config(family, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    count = itertools.count(1)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            values = torch.arange(tensor.numel()).view(tensor.shape) / tensor.numel()
            tensor.copy_(values + next(count))
    model.save_pretrained(directory, save_original_format=original, **save)
    return model


def read_all(reader: CheckpointReader, model: PreTrainedModel):
    for name, tensor in model.state_dict().items():
        yield name, reader.read(name, 0, tensor.shape[0])


def files_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_bit_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("tied", TIES)
@pytest.mark.parametrize("original", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_gives_the_files_of_save_pretrained_and_loads_to_the_same_bits(
    tmp_path, family, original, tied
):
    model = saved_model(tmp_path / "theirs", family, tied=tied, original=original)
    meta = build_meta_model(load_config(path=str(tmp_path / "theirs"), config=None))
    reader = CheckpointReader(tmp_path / "theirs", meta)
    assert_bit_equal(dict(read_all(reader, model)), model.state_dict())

    for layout in (True, False):
        ours = tmp_path / f"ours-{layout}"
        export_checkpoint(ours, model.config, read_all(reader, model), original_layout=layout)
        if layout is original:
            assert_bit_equal(files_of(ours), files_of(tmp_path / "theirs"))
        assert ("lm_head.weight" in files_of(ours)) is not tied
        again = AutoModelForCausalLM.from_pretrained(ours)
        assert_bit_equal(again.state_dict(), model.state_dict())
        shared = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
        assert shared is tied


def test_bfloat16_weights_and_the_fp32_router_keep_their_dtypes(tmp_path):
    config = tiny_config("deepseek_v3", dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "theirs")
    reader = CheckpointReader(tmp_path / "theirs", build_meta_model(config))
    experts, router = "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.gate.weight"
    assert (reader.dtype_of(experts), reader.dtype_of(router)) == (torch.bfloat16, torch.float32)

    export_checkpoint(tmp_path / "ours", config, read_all(reader, model))
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == "bfloat16"
    assert_bit_equal(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_bit_equal(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w1.weight"),
        ("olmoe", "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ("deepseek_v3", "model.layers.1.mlp.experts.3.gate_proj.weight"),
    ],
)
def test_the_original_layout_has_the_published_names_with_the_gate_in_the_first_rows(
    tmp_path, family, name
):
    config = tiny_config(family)
    tensors = AutoModelForCausalLM.from_config(config).state_dict()
    export_checkpoint(tmp_path / "out", config, tensors.items())
    gate = tensors["model.layers.1.mlp.experts.gate_up_proj"][3, :16]
    assert torch.equal(files_of(tmp_path / "out")[name], gate)


def test_gpt_oss_stays_fused_transposed_and_interleaved_with_its_biases(tmp_path):
    config = tiny_config("gpt_oss")
    tensors = AutoModelForCausalLM.from_config(config).state_dict()
    export_checkpoint(tmp_path / "out", config, tensors.items())
    assert_bit_equal(files_of(tmp_path / "out"), dict(tensors))


@pytest.mark.parametrize("tied", TIES)
def test_the_loss_is_the_same_after_a_round_trip(tmp_path, tied):
    config = tiny_config("qwen3_moe", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config).eval()
    export_checkpoint(tmp_path / "out", config, model.named_parameters())
    # Whoever may read the configuration may read the weights.
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(20).view(1, 20)
    with torch.no_grad():
        assert torch.equal(model(ids, labels=ids).loss, again(ids, labels=ids).loss)


def test_rows_of_per_expert_files_are_those_of_the_fused_tensor_and_only_theirs_are_read(tmp_path):
    model = saved_model(tmp_path, "mixtral")
    reader = CheckpointReader(tmp_path, build_meta_model(model.config))
    assert reader.bytes_read == 0
    name = "model.layers.1.mlp.experts.gate_up_proj"
    rows = reader.read(name, 1, 3)
    assert torch.equal(rows, model.state_dict()[name][1:3])
    assert reader.bytes_read == rows.nbytes


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_rows_of_a_dense_tensor_are_read_alone_and_may_be_none(tmp_path, name):
    model = saved_model(tmp_path, "qwen3_moe")
    reader = CheckpointReader(tmp_path, build_meta_model(model.config))
    assert torch.equal(reader.read(name, 3, 7), model.state_dict()[name][3:7])
    assert reader.bytes_read == model.state_dict()[name][3:7].nbytes
    assert reader.read(name, 5, 5).shape == (0, *model.state_dict()[name].shape[1:])


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.experts.down_proj"])
def test_writing_into_what_was_read_changes_neither_file_nor_later_reads(tmp_path, name):
    model = saved_model(tmp_path, "qwen3_moe", original=False)
    reader = CheckpointReader(tmp_path, build_meta_model(model.config))
    content = (tmp_path / "model.safetensors").read_bytes()
    reader.read(name, 0, 4).zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == content
    assert torch.equal(reader.read(name, 0, 4), model.state_dict()[name][:4])


def test_a_sharded_checkpoint_reads_and_exports_like_one_file(tmp_path):
    model = saved_model(tmp_path / "theirs", "olmoe", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    reader = CheckpointReader(tmp_path / "theirs", build_meta_model(model.config))
    limit = 10_000
    export_checkpoint(
        tmp_path / "ours", model.config, read_all(reader, model), max_shard_bytes=limit
    )
    shards = {file.name: load_file(file) for file in (tmp_path / "ours").glob("*.safetensors")}
    assert all(sum(t.nbytes for t in shard.values()) <= limit for shard in shards.values())
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    placed = {key: name for name, shard in shards.items() for key in shard}
    assert index["weight_map"] == placed
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.state_dict().values())
    assert_bit_equal(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))


def test_shards_are_on_disk_before_the_last_tensors_are_asked_for(tmp_path):
    config = tiny_config("qwen3_moe")
    tensors = AutoModelForCausalLM.from_config(config).state_dict()
    written = []

    def watched():
        for item in tensors.items():
            written.append(sum(f.stat().st_size for f in tmp_path.glob(".out.*/*.safetensors")))
            yield item

    limit, given = 10_000, 0
    export_checkpoint(tmp_path / "out", config, watched(), max_shard_bytes=limit)
    for on_disk, tensor in zip(written, tensors.values(), strict=True):
        assert given - on_disk <= limit
        given += tensor.nbytes
    assert written[-1] > given / 2


def test_an_index_that_is_none_is_named(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe", max_shard_size="8KB")
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(CheckpointError, match=r"index\.json is not an index with a `weight_map`"):
        CheckpointReader(tmp_path, build_meta_model(model.config))


def test_a_tied_checkpoint_may_hold_the_head_in_place_of_the_embedding(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe", tied=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    reader = CheckpointReader(tmp_path, build_meta_model(model.config))
    assert_bit_equal(dict(read_all(reader, model)), model.state_dict())


def test_all_missing_and_misshapen_tensors_are_named_in_one_error(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.1.mlp.experts.3.down_proj.weight"] = torch.zeros(16, 9)
    tensors["lm_head.weight"] = torch.zeros(64, 16)
    tensors["model.layers.1.extra.weight"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(tmp_path, build_meta_model(model.config))
    message = str(error.value)
    assert "model.norm.weight [16] is missing" in message
    assert "layers.0.mlp.experts.2.up_proj.weight should be [16, 16], found nothing" in message
    assert "layers.1.mlp.experts.3.down_proj.weight should be [16, 16], found [16, 9]" in message
    assert "lm_head.weight should be [50, 16], found [64, 16]" in message
    assert "unexpected: model.layers.1.extra.weight" in message
    assert "layers.1.mlp.experts.gate_up_proj" not in message


def test_every_tensor_of_a_missing_projection_is_reported_through_the_fused_one(tmp_path):
    model = saved_model(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if ".w3." not in name}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"experts\.3\.w3\.weight should be \[16, 16\]"):
        CheckpointReader(tmp_path, build_meta_model(model.config))


def test_experts_with_a_gap_in_their_numbers_are_not_taken_for_each_other(tmp_path):
    model = saved_model(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("experts.2", "experts.7"): t for name, t in load_file(file).items()}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"experts\.2\.w2\.weight .* found nothing"):
        CheckpointReader(tmp_path, build_meta_model(model.config))


def test_a_tensor_the_model_does_not_use_is_a_warning(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe")
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"visual.weight": torch.zeros(1)}, file)
    with pytest.warns(UserWarning, match=r"unexpected: visual\.weight"):
        CheckpointReader(tmp_path, build_meta_model(model.config))


def test_a_truncated_file_is_named(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* not a whole safetensors"):
        CheckpointReader(tmp_path, build_meta_model(model.config))


def test_a_missing_shard_is_named(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe", max_shard_size="8KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {shard.name}"):
        CheckpointReader(tmp_path, build_meta_model(model.config))


def test_a_shard_without_a_tensor_the_index_promises_is_named(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe", max_shard_size="8KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["model.norm.weight"]
    content["weight_map"]["model.ghost"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=rf"promises tensors that {shard} lacks: model\.ghost"
    ):
        CheckpointReader(tmp_path, build_meta_model(model.config))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        pytest.param(lambda d: None, "nothing", id="no such directory"),
        pytest.param(lambda d: d.mkdir(), "nothing", id="empty"),
        pytest.param(
            lambda d: (d.mkdir(), (d / "pytorch_model.bin").touch()),
            "pytorch_model.bin",
            id="pickle",
        ),
    ],
)
def test_a_directory_without_safetensors_says_what_it_holds(tmp_path, make, found):
    make(tmp_path / "model")
    meta = build_meta_model(tiny_config("qwen3_moe"))
    with pytest.raises(CheckpointError, match=rf"neither .* \(found: {found}\)"):
        CheckpointReader(tmp_path / "model", meta)


def test_a_quantised_checkpoint_is_refused_with_its_dtype(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* F8_E4M3; .*dequantise"):
        CheckpointReader(tmp_path, build_meta_model(model.config))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.norm.weight", torch.int64),
        ("model.layers.1.mlp.experts.3.up_proj.weight", torch.int64),
        ("lm_head.weight", torch.bool),
    ],
    ids=["dense", "one expert", "bool"],
)
def test_whole_numbers_for_weights_are_refused_by_the_name_of_the_tensor(tmp_path, name, dtype):
    model = saved_model(tmp_path, "qwen3_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(dtype)}, file)
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(tmp_path, build_meta_model(model.config))
    found = str(dtype).removeprefix("torch.")
    assert f"Qwen3MoeForCausalLM: {name} should be floating point, found {found}." in str(
        error.value
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e300])
@pytest.mark.parametrize(
    ("name", "read", "rows"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight", 50),
        (
            "model.layers.1.mlp.experts.3.up_proj.weight",
            "model.layers.1.mlp.experts.gate_up_proj",
            4,
        ),
    ],
    ids=["dense", "one expert"],
)
def test_a_number_that_is_not_finite_is_refused_with_the_tensor_that_has_it(
    tmp_path, name, read, rows, value
):
    model = saved_model(tmp_path, "qwen3_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name].double()
    tensors[name][-1, 5] = value
    save_file(tensors, file)
    reader = CheckpointReader(tmp_path, build_meta_model(model.config))
    reader.read(read, 0, rows - 1)
    reader.read(read, rows, rows)
    with pytest.raises(CheckpointError) as error:
        reader.read(read, 0, rows)
    assert str(error.value).startswith(f"{name} in {tmp_path}: 1 of the ")


def test_export_refuses_a_directory_that_holds_something(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="not empty"):
        export_checkpoint(tmp_path, tiny_config("qwen3_moe"), [])
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def altered(tensors: dict[str, torch.Tensor], change: str) -> list[tuple[str, torch.Tensor]]:
    items = [(name, t) for name, t in tensors.items() if change != "missing" or "norm" not in name]
    if change == "twice":
        items.append(items[3])
    if change == "unknown":
        items.append(("model.ghost", torch.zeros(1)))
    if change == "padded vocabulary":
        items[0] = (items[0][0], torch.zeros(64, 16))
    return items


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"tensors never came: model\.layers\.0\.input_layernorm\.weight"),
        ("twice", "came twice"),
        ("unknown", r"model\.ghost is not in Qwen3MoeForCausalLM"),
        ("padded vocabulary", r"model\.embed_tokens\.weight is \[64, 16\], should be \[50, 16\]"),
    ],
)
def test_a_failed_export_names_the_tensor_and_leaves_nothing_behind(tmp_path, change, message):
    config = tiny_config("qwen3_moe")
    tensors = AutoModelForCausalLM.from_config(config).state_dict()
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(tmp_path / "out", config, altered(tensors, change))
    assert list(tmp_path.iterdir()) == []


def test_export_takes_tokenizer_files_along(tmp_path):
    model = saved_model(tmp_path / "theirs", "qwen3_moe")
    (tmp_path / "theirs/tokenizer.json").write_text("{}")
    (tmp_path / "theirs/generation_config.json").write_text('{"eos_token_id": 7}')
    export_checkpoint(
        tmp_path / "ours",
        model.config,
        model.state_dict().items(),
        tokenizer_dir=tmp_path / "theirs",
    )
    assert (tmp_path / "ours/tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "ours/generation_config.json").read_text())["eos_token_id"] == 7
    shutil.rmtree(tmp_path / "theirs")
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generation_config.eos_token_id == 7
    )


def test_export_without_the_tokenizer_it_should_take_fails_before_it_reads_a_tensor(tmp_path):
    with pytest.raises(CheckpointError, match="holds no tokenizer files"):
        export_checkpoint(
            tmp_path / "out",
            tiny_config("qwen3_moe"),
            (pytest.fail("read") for _ in range(1)),
            tokenizer_dir=tmp_path,
        )


def test_export_does_not_ask_for_implementations_of_the_training_process(tmp_path):
    config = tiny_config("mixtral")
    tensors = AutoModelForCausalLM.from_config(config).state_dict()
    config._attn_implementation = "of_another_process"
    config._experts_implementation = "of_another_process"
    export_checkpoint(tmp_path / "out", config, tensors.items())
    assert "of_another_process" not in (tmp_path / "out/config.json").read_text()
    assert config._attn_implementation == "of_another_process"


def test_export_does_not_keep_what_a_source_hands_out_from_one_buffer(tmp_path):
    """A bounded source reuses its buffer; what was added before must not change with it."""
    config = tiny_config("mixtral", tie_word_embeddings=True)
    tensors = AutoModelForCausalLM.from_config(config).state_dict()
    buffer = torch.empty(max(t.numel() for t in tensors.values()))

    def through_one_buffer():
        for name, tensor in tensors.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)

    export_checkpoint(tmp_path / "out", config, through_one_buffer())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_bit_equal(again.state_dict(), tensors)
