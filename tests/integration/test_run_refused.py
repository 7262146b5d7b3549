"""Jobs that cannot work are refused before any process of theirs starts, with one message."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from driven_run import tiny_job
from flatpeak.controller.cli import run_command
from flatpeak.controller.spec import Spec
from flatpeak.controller.spec_file import dump_spec
from tiny_models import tiny_config, tiny_content

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
EIGHT = {"sequences_per_step": 8}


@pytest.fixture(scope="module", autouse=True)
def launch_is_imported() -> None:
    """Torch takes seconds to import, which are not those of a refusal."""
    import flatpeak.controller.launch  # noqa: F401


def refused(
    job: Spec, folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str
) -> tuple[int, str]:
    """(exit code, message) of `flatpeak train`, which took seconds at most and started no Ray."""
    (folder / "job.yaml").write_text(dump_spec(job))
    sets = [part for override in overrides for part in ("--set", override)]
    began = time.process_time()
    code = run_command(["train", str(folder / "job.yaml"), *sets])
    assert time.process_time() - began < 10
    out, err = capsys.readouterr()
    # What the spec alone tells is refused before that.
    assert out in ("", "loading torch and Ray, checking the job\n")
    assert err.startswith("flatpeak: ")
    assert "Traceback" not in err
    assert not ray.is_initialized()
    assert not Path(job.runs_dir).exists(), "a refused job does not take its name"
    return code, err.removeprefix("flatpeak: ").rstrip("\n")


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"data": {"source": "absent.txt"}}, 2, "absent.txt"),
        ({"data": {"source": "empty.txt"}}, 2, "holds no documents"),
        ({"data": {"cache_dir": "/dev/null"}}, 2, "data.cache_dir = /dev/null is no directory"),
        (
            {"model": {"config": tiny_content("qwen3_moe", **SMALL | {"vocab_size": 50})}},
            2,
            "outside a vocabulary of 50; set model.config.vocab_size to 257 or more",
        ),
        (
            {"cluster": {"workers": 8}, "parallel": {"expert": 8}, "train": EIGHT},
            2,
            "parallel.expert = 8 does not suit the model's 4 experts; with cluster.workers = 8 "
            "use one of [1, 2, 4]",
        ),
        (
            {"cluster": {"workers": 8}, "parallel": {"sequence": 8}, "train": EIGHT},
            2,
            "parallel.sequence = 8 does not suit the model's 4 attention heads; "
            "with cluster.workers = 8 use one of [1, 2, 4]",
        ),
        (
            {"model": {"config": tiny_content("qwen3_moe", **SMALL | {"num_layers": 2})}},
            2,
            "qwen3_moe has no setting 'num_layers', the nearest is 'num_hidden_layers'",
        ),
        (
            {"train": {"router_bias_update_rate": 0.001}},
            2,
            "train.router_bias_update_rate = 0.001, but the routers of Qwen3MoeForCausalLM have no",
        ),
        (
            {"memory": {"dispatch": {"budget_bytes": 1000}}},
            2,
            "memory.dispatch.budget_bytes = 1,000 is too little: one token at a time and 4 foreign",
        ),
        (
            {"memory": {"device_budget_bytes": 8_000}},
            3,
            "an 8th of memory.device_budget_bytes is 1,000, too little for the dispatch",
        ),
        ({"cluster": {"shm_dir": "/absent"}}, 2, "cluster.shm_dir = /absent is no directory"),
        (
            {"cluster": {"device": "cuda", "workers": 200}, "train": {"sequences_per_step": 200}},
            2,
            "cluster.device = cuda needs a GPU for each of cluster.workers = 200, this machine",
        ),
        (
            {"cluster": {"optimizers": 16_384}},
            2,
            "cluster.optimizers = 16384 are more processes than the",
        ),
        (
            {"cluster": {"address": "127.0.0.1:1"}},
            4,
            "no Ray cluster answers at cluster.address = 127.0.0.1:1: ",
        ),
        (
            {"cluster": {"address": "127.0.0.1:99999"}},
            2,
            "cluster.address = '127.0.0.1:99999' is no address; give host:port",
        ),
    ],
    ids=[
        *("missing corpus", "empty corpus", "no cache", "vocabulary smaller than a token id"),
        *("more expert ranks than experts", "more sequence ranks than heads"),
        *("unknown key of the model", "no router biases"),
        *("dispatch budget of nothing", "device budget of nothing", "no shm_dir"),
        *("no GPU", "too many processes", "dead address", "no address"),
    ],
)
def test_a_job_that_cannot_work_is_refused(
    tmp_path, monkeypatch, capsys, changes: dict[str, Any], code, message
):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    found, text = refused(tiny_job(tmp_path, **changes), tmp_path, capsys)
    assert (found, text.count("\n")) == (code, 0)
    assert message in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.expert=3", "parallel.expert = 3 does not divide cluster.workers = 2; use one"),
        ("train.sequence_length=33", "train.sequence_length = 33 is no multiple of parallel.seq"),
    ],
    ids=["degree that does not divide W", "length that does not divide by D"],
)
def test_degrees_that_do_not_divide_are_refused(tmp_path, capsys, override, message):
    job = tiny_job(tmp_path, cluster={"workers": 2}, parallel={"sequence": 2})
    code, text = refused(job, tmp_path, capsys, override)
    assert code == 2
    assert message in text


def test_a_taken_rendezvous_port_is_refused(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = tiny_job(tmp_path, cluster={"rendezvous_port": port})
        code, text = refused(job, tmp_path, capsys)
    assert code == 2
    assert text.startswith(f"cluster.rendezvous_port = {port} cannot be had at 127.0.0.1")
    assert text.endswith("0 takes any free port")


def test_a_model_larger_than_the_shared_memory_does_not_fit(tmp_path, capsys):
    huge = {"vocab_size": 2**30, "hidden_size": 2**14}
    job = tiny_job(tmp_path, model={"config": tiny_content("qwen3_moe", **SMALL | huge)})
    code, text = refused(job, tmp_path, capsys)
    assert code == 3
    assert "the arenas take at least" in text
    assert f"cluster.shm_dir = {tmp_path / 'shm'}, and {tmp_path / 'shm'} has" in text


@pytest.mark.parametrize("damage", ["missing", "misshapen", "whole numbers"])
def test_a_checkpoint_with_a_wrong_tensor_is_refused(tmp_path, capsys, damage):
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", **SMALL)).save_pretrained(folder)
    file, name = folder / "model.safetensors", "model.norm.weight"
    tensors = load_file(file)
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.ones(17) if damage == "misshapen" else torch.ones(16).long()
    save_file(tensors, file)
    capsys.readouterr()  # saving shows a progress bar
    job = tiny_job(tmp_path, model={"path": str(folder), "config": None})
    code, text = refused(job, tmp_path, capsys)
    assert code == 2
    assert name in text


def test_with_json_a_refusal_is_one_object(tmp_path, capsys):
    job = tiny_job(tmp_path, cluster={"shm_dir": "/absent"})
    (tmp_path / "job.yaml").write_text(dump_spec(job))
    assert run_command(["train", str(tmp_path / "job.yaml"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["exit_code"]) == ("SpecError", 2)
