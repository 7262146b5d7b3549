"""`flatpeak export`: what a run leaves for those who use its model, or go on elsewhere."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from driven_run import make_corpus
from flatpeak.controller.cli import run_command
from flatpeak.controller.spec import Spec
from local_run import tiny_spec
from saved_run import LR, SavedRun, gradient
from tiny_models import tiny_content

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}


def job(folder: Path, family: str = "qwen3_moe", **sections: object) -> Spec:
    heads = {"num_key_value_heads": 4} if family == "deepseek_v3" else {}
    return tiny_spec(
        tiny_content(family, **SMALL | heads),
        runs_dir=str(folder / "runs"),
        data={"source": make_corpus(folder), "cache_dir": str(folder / "cache")},
        **sections,
    )


def export(run: SavedRun, to: Path, *options: str) -> int:
    runs_dir = run.folder.path.parent
    return run_command(["export", "tiny", "--runs-dir", str(runs_dir), "--to", str(to), *options])


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.arange(40).view(1, 40)).logits


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_transformers_loads_the_masters_of_the_newest_snapshot(tmp_path, family, capsys):
    run = SavedRun(job(tmp_path, family))
    for _ in range(2):
        run.update()
        run.save()
    assert export(run, tmp_path / "out", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["dtype"], said["skipped"]) == (2, "float32", [])
    assert said["parameters"] == sum(run.sizes.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name in run.sizes:
        assert torch.equal(loaded[name].flatten(), run.state(name)[0]), name
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors"} <= written
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_any_step_that_was_kept_can_be_exported_in_any_dtype(tmp_path, capsys):
    run = SavedRun(job(tmp_path, "deepseek_v3"))
    run.save()
    first = {name: run.state(name)[0] for name in run.sizes}
    run.update()
    run.save()
    assert export(run, tmp_path / "out", "--step", "0", "--dtype", "bfloat16") == 0
    assert "parameters in bfloat16, step 0 of tiny" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, master in first.items():
        assert torch.equal(loaded[name].flatten(), master.to(loaded[name].dtype)), name
    precise = {name for name, tensor in loaded.items() if tensor.dtype == torch.float32}
    assert precise == {name for name in loaded if ".mlp.gate." in name}  # as the family keeps them
    assert export(run, tmp_path / "more", "--step", "7") == 2
    assert "has no snapshot of step 7; it has: 0, 1" in capsys.readouterr().err


def test_what_is_imported_untrained_is_exported_bit_by_bit(tmp_path):
    """Hugging Face to ours and back, in both layouts, with square expert matrices."""
    for original in (True, False):
        theirs, here = tmp_path / f"theirs-{original}", tmp_path / f"here-{original}"
        here.mkdir()
        config = {"model": {"path": str(theirs), "config": None}}
        source = job(here)
        model = AutoModelForCausalLM.from_config(SavedRun(source).model.config)
        model.to(torch.bfloat16).save_pretrained(theirs, save_original_format=original)
        run = SavedRun(job(here, run="again", **config))
        run.save()
        out = here / "out"
        arguments = ["--runs-dir", str(here / "runs"), "--to", str(out), "--dtype", "bfloat16"]
        assert run_command(["export", "again", *arguments]) == 0
        found = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
        for name, tensor in model.state_dict().items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        if original:
            ours, wanted = (load_file(f / "model.safetensors") for f in (out, theirs))
            assert ours.keys() == wanted.keys()
            assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_torch_adamw_goes_on_from_the_optimizer_state(tmp_path):
    run = SavedRun(job(tmp_path))
    for _ in range(3):
        run.update()
    run.save()
    assert export(run, tmp_path / "out", "--optimizer-state") == 0
    tensors = load_file(tmp_path / "out" / "optimizer.safetensors")
    settings = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert (settings["step"], settings["updates"], settings["router_biases"]) == (3, 3, [])
    parameters = {name: tensors[f"{name}.master"].clone() for name in run.sizes}
    decayed = set(settings["decayed"])
    groups = [
        {
            "params": [p for name, p in parameters.items() if (name in decayed) == decays],
            "weight_decay": settings["weight_decay"] if decays else 0.0,
        }
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=settings["betas"], eps=settings["eps"])
    for name, p in parameters.items():
        adamw.state[p] = {
            "step": torch.tensor(float(settings["updates"])),
            "exp_avg": tensors[f"{name}.exp_avg"],
            "exp_avg_sq": tensors[f"{name}.exp_avg_sq"],
        }
        p.grad = gradient(4, name, p.numel()).view(p.shape)
    adamw.step()
    run.update()
    for name, p in parameters.items():
        torch.testing.assert_close(p.flatten(), run.state(name)[0], rtol=1e-6, atol=1e-7)
    assert logits(tmp_path / "out").shape == (1, 40, 257)  # the state is in nobody's way


def test_a_tokenizer_goes_along(tmp_path):
    spec = job(tmp_path)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "notes.txt").touch()
    data = spec.data.model_copy(update={"tokenizer": str(tokenizer)})
    run = SavedRun(spec.model_copy(update={"data": data}))
    run.save()
    assert export(run, tmp_path / "out") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_a_directory_that_holds_something_is_left_alone(tmp_path, capsys):
    run = SavedRun(job(tmp_path))
    run.save()
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").touch()
    assert export(run, out) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_an_export_among_the_snapshots_which_come_and_go_is_refused(tmp_path, capsys):
    run = SavedRun(job(tmp_path))
    snapshots = run.save().parent
    (tmp_path / "link").symlink_to(snapshots)
    for target in (snapshots / "step-007", tmp_path / "link" / "a" / "b"):
        assert export(run, target) == 2
        assert "is among the run's snapshots" in capsys.readouterr().err
        assert not target.exists()


def test_a_damaged_snapshot_is_passed_over_and_named(tmp_path, capsys):
    run = SavedRun(job(tmp_path))
    run.save()
    run.update()
    part = next(run.save().glob("*.arrow"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert export(run, tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert "step 0 of tiny" in out
    assert "step-1 is left out: " in err
    assert export(run, tmp_path / "more", "--step", "1") == 2
    assert "do not have their checksum; use an older snapshot" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_a_run_without_a_snapshot_says_so(tmp_path, capsys):
    run = SavedRun(job(tmp_path))
    assert export(run, tmp_path / "out") == 2
    assert "has no whole snapshot: it has written none yet" in capsys.readouterr().err


@pytest.mark.parametrize("state", [(), ("--optimizer-state",)], ids=["model", "and state"])
def test_an_export_that_does_not_fit_leaves_nothing(tmp_path, capsys, state):
    run = SavedRun(job(tmp_path))
    run.save()
    size = 4 * sum(run.sizes.values())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size if state else size // 2, hard))
    try:
        code = export(run, tmp_path / "out", *state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert f"cannot write {tmp_path / 'out'}: " in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


def refusal(run: SavedRun, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `flatpeak train --resume` says of a job that it refuses before it starts anything."""
    from flatpeak.controller.spec_file import dump_spec

    (tmp_path / "job.yaml").write_text(dump_spec(spec))
    before = (run.folder.path / "run.json").read_bytes()
    assert run_command(["train", str(tmp_path / "job.yaml"), "--resume"]) == 2
    assert (run.folder.path / "run.json").read_bytes() == before
    out, err = capsys.readouterr()
    assert out == "loading torch and Ray, checking the job\n"
    assert err.count("flatpeak: ") == 1
    return err


def test_a_snapshot_of_another_model_is_refused_before_the_start(tmp_path, capsys):
    spec = job(tmp_path)
    run = SavedRun(spec)
    run.save()
    config = tiny_content("qwen3_moe", **SMALL | {"num_experts": 2})
    other = spec.model_copy(update={"model": type(spec.model)(config=config)})
    said = refusal(run, other, tmp_path, capsys)
    assert "step-0 is a snapshot of another model: 6 parameters differ" in said


def test_a_snapshot_of_a_newer_format_is_refused_before_the_start(tmp_path, capsys):
    from flatpeak.workers.snapshot_files import read_manifest, write_manifest

    spec = job(tmp_path)
    run = SavedRun(spec)
    run.save()
    run.update()
    folder = run.save()
    write_manifest(folder, read_manifest(folder) | {"format": 3})
    said = refusal(run, spec, tmp_path, capsys)
    assert "step-1/manifest.json has format 3, and this version of Flatpeak reads 2" in said
    assert export(run, tmp_path / "out") == 2
