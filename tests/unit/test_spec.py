"""The job spec: what it takes, what it refuses and in which words."""

import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from flatpeak.controller.spec import (
    Spec,
    check_against_model,
    divisors,
    parse_spec,
    resolve_parallel,
)
from flatpeak.controller.spec_file import STARTER_VALUES, dump_spec, load_spec, starter_yaml
from flatpeak.workers.errors import SpecError

SMALLEST = {"run": "a", "model": {"path": "/models/x"}}


def written(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def with_overrides(folder: Path, *overrides: str) -> Spec:
    return load_spec(written(folder, starter_yaml()), overrides)


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        with_overrides(folder, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


def sections(root: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [
        candidate
        for field in root.model_fields.values()
        for candidate in (field.annotation, *typing.get_args(field.annotation))
        if isinstance(candidate, type) and issubclass(candidate, BaseModel)
    ]
    return [root, *(section for child in inner for section in sections(child))]


@pytest.mark.parametrize("section", sections(Spec), ids=lambda section: section.__name__)
def test_every_field_says_what_it_does_in_one_line(section):
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no line under it"
        assert "\n" not in field.description


def test_devices_do_not_update_what_is_on_other_nodes(tmp_path):
    overrides = ("cluster.optimizer_placement=anywhere", "memory.optimizer.update_on=device")
    text = refusal(tmp_path, *overrides)
    assert "set update_on to host, or optimizer_placement to beside" in text


@pytest.mark.parametrize(
    ("setting", "better"),
    [
        ("cluster.address=local", "set it to auto, or mirrors to 0"),
        ("cluster.optimizer_placement=anywhere", "set it to beside, or mirrors to 0"),
        ("memory.optimizer.update_on=device", "set it to host, or mirrors to 0"),
        ("memory.optimizer.update_on=auto", "set it to host, or mirrors to 0"),
    ],
)
def test_mirrors_are_refused_where_they_would_not_be_on_another_node_or_not_equal(
    tmp_path, setting, better
):
    mirrored = ("memory.optimizer.mirrors=1", "cluster.address=auto")
    assert with_overrides(tmp_path, *mirrored).memory.optimizer.mirrors == 1
    text = refusal(tmp_path, *mirrored, setting)
    assert f"which {setting.replace('=', ' = ')} does not give; {better}" in text


def test_there_are_arenas_for_as_many_optimizer_actors_as_there_may_be(tmp_path):
    assert with_overrides(tmp_path, "cluster.optimizers=3").cluster.arenas == 3
    more = ("cluster.optimizers=3", "cluster.max_optimizers=8")
    assert with_overrides(tmp_path, *more).cluster.arenas == 8
    text = refusal(tmp_path, "cluster.optimizers=3", "cluster.max_optimizers=2")
    assert "max_optimizers = 2 is below optimizers = 3; set it to 3 or more" in text
    text = refusal(tmp_path, "cluster.max_optimizers=8", "cluster.optimizer_placement=anywhere")
    assert "max_optimizers is for optimizer_placement = beside" in text
    assert "cluster.max_optimizers = 0: " in refusal(tmp_path, "cluster.max_optimizers=0")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["cluster.autoscale.optimizers=[3,2]"],
            "cluster.autoscale: optimizers = [3, 2] is [fewest, most]; use [2, 3]",
        ),
        (["cluster.autoscale.workers=[3,2]"], "workers = [3, 2] is [fewest, most]; use [2, 3]"),
        (
            ["cluster.autoscale.optimizers=[1,3]"],
            "asks for up to 3 actors, but there are arenas for 1; set max_optimizers to 3 or more",
        ),
        (
            ["cluster.autoscale.optimizers=[2,3]", "cluster.max_optimizers=3"],
            "optimizers = 1 is outside autoscale.optimizers = [2, 3]; start with 2, or widen",
        ),
        (
            ["cluster.autoscale.workers=[1,2]", "cluster.workers=4"],
            "workers = 4 is outside autoscale.workers = [1, 2]; start with 2, or widen the range",
        ),
        (
            ["cluster.autoscale.optimizers=[1,1]", "cluster.optimizer_placement=anywhere"],
            "autoscale.optimizers is for optimizer_placement = beside",
        ),
        (
            ["cluster.autoscale.optimizers=[1,1]", "memory.optimizer.update_on=device"],
            "where the workers do the updates; leave it out, or set update_on to host",
        ),
        (["cluster.autoscale.optimizers=[0,1]"], "cluster.autoscale.optimizers.0 = 0: should be"),
    ],
)
def test_a_range_to_scale_in_suits_the_run(tmp_path, overrides, said):
    assert said in refusal(tmp_path, *overrides)


def test_a_range_to_scale_in_is_read_back_as_it_was_written(tmp_path):
    given = ("cluster.max_optimizers=4", "cluster.autoscale.optimizers=[1,4]")
    spec = with_overrides(tmp_path, *given)
    assert spec.cluster.autoscale.optimizers == (1, 4)
    assert parse_spec(yaml.safe_load(dump_spec(spec))) == spec


def test_the_tree_is_frozen():
    spec = parse_spec(SMALLEST)
    with pytest.raises(ValueError, match="frozen"):
        spec.train.steps = 3  # pyright: ignore


def test_the_smallest_spec_has_defaults_for_the_rest():
    assert parse_spec(SMALLEST).train.steps == 100


def test_the_starter_validates_and_differs_from_the_defaults_only_where_it_says(tmp_path):
    spec = with_overrides(tmp_path)
    plain = parse_spec({"run": "my-run", "model": {"config": spec.model.config}})
    changed = {path for path in leaves(spec.model_dump()) if at(spec, path) != at(plain, path)}
    assert changed <= set(STARTER_VALUES)
    assert spec.model.config == STARTER_VALUES["model.config"]


def test_the_starter_names_every_key(tmp_path):
    assert set(leaves(yaml.safe_load(starter_yaml()))) == set(leaves(with_overrides(tmp_path)))


def leaves(tree: Any, prefix: str = "") -> list[str]:
    tree = tree.model_dump() if isinstance(tree, BaseModel) else tree
    paths = []
    for name, value in tree.items():
        inner = isinstance(value, dict) and name != "config"
        paths += leaves(value, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return paths


def at(spec: Spec, path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_a_written_spec_reads_back_equal(tmp_path):
    spec = with_overrides(tmp_path, "train.lr=1e-4", "train.betas=[0.8, 0.99]", "run=ohm")
    spec = spec.model_copy(update={"runs_dir": "/tmp/Läufe #1: neu"})
    assert load_spec(written(tmp_path, dump_spec(spec))) == spec


def test_an_empty_section_has_its_defaults(tmp_path):
    text = "run: a\nmodel: {path: x}\nmemory:\n  dispatch:\ntrain:\n"
    assert load_spec(written(tmp_path, text)) == parse_spec({"run": "a", "model": {"path": "x"}})


def test_a_number_with_an_exponent_needs_no_dot(tmp_path):
    assert with_overrides(tmp_path, "train.lr=1e-4").train.lr == 1e-4
    assert with_overrides(tmp_path, "train.eps=2E-10").train.eps == 2e-10


def test_overrides_apply_in_order_and_below_absent_sections(tmp_path):
    path = written(tmp_path, "run: a\nmodel: {path: x}\n")
    spec = load_spec(path, ["memory.dispatch.max_chunks=3", "memory.dispatch.max_chunks=5"])
    assert spec.memory.dispatch.max_chunks == 5


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 10**9),
    lr=st.floats(1e-12, 1.0),
    offload=st.booleans(),
    budget=st.one_of(st.just("auto"), st.integers(0, 2**50)),
    name=st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True).filter(
        lambda name: isinstance(yaml.safe_load(name), str)
    ),
    hidden=st.integers(1, 10**6),
)
def test_any_legal_override_arrives_as_the_value_that_was_written(
    tmp_path_factory, steps, lr, offload, budget, name, hidden
):
    spec = with_overrides(
        tmp_path_factory.getbasetemp(),
        f"train.steps={steps}",
        f"train.lr={lr!r}",
        f"memory.boundaries.offload={str(offload).lower()}",
        f"memory.boundaries.host_budget_bytes={budget}",
        f"run={name}",
        f"model.config.hidden_size={hidden}",
    )
    assert (spec.train.steps, spec.train.lr, spec.run) == (steps, lr, name)
    assert spec.memory.boundaries.offload is offload
    assert spec.memory.boundaries.host_budget_bytes == budget
    assert spec.model.config is not None
    assert spec.model.config["hidden_size"] == hidden
    assert parse_spec(yaml.safe_load(dump_spec(spec))) == spec


REFUSALS = {
    "unknown key": (
        ["memory.dispatch.tokens_chunk=3"],
        "--set 'memory.dispatch.tokens_chunk=3': "
        "section `memory.dispatch` has no key `tokens_chunk`; "
        "the nearest is `memory.dispatch.tokens_per_chunk`",
    ),
    "unknown key of another section": (
        ["num_workers=3"],
        "--set 'num_workers=3': the top level has no key `num_workers`; "
        "the nearest is `cluster.workers`",
    ),
    "unknown key like no other": (
        ["gradient_checkpoint=true"],
        "--set 'gradient_checkpoint=true': "
        "the top level has no key `gradient_checkpoint`; the nearest is `train` of run, "
        "runs_dir, resume, model, data, train, cluster, parallel, memory, snapshots, metrics, "
        "logging",
    ),
    "wrong type": (
        ["train.steps=many"],
        "--set 'train.steps=many': train.steps = 'many': should be a valid integer",
    ),
    "quoted number": (
        ["train.steps='20'"],
        "--set \"train.steps='20'\": train.steps = '20': should be a valid integer",
    ),
    "out of bounds": (
        ["train.steps=0"],
        "--set 'train.steps=0': train.steps = 0: should be greater than or equal to 1",
    ),
    "below none": (
        ["train.z_loss=-1e-4"],
        "--set 'train.z_loss=-1e-4': train.z_loss = -0.0001: should be greater than or equal to 0",
    ),
    "more than all": (
        ["train.label_smoothing=1"],
        "--set 'train.label_smoothing=1': train.label_smoothing = 1: should be less than 1",
    ),
    "neither number nor auto": (
        ["parallel.sequence=most"],
        "--set 'parallel.sequence=most': "
        "parallel.sequence = 'most': should be a valid integer or 'auto'",
    ),
    "infinite": (
        ["train.lr=.inf"],
        "--set 'train.lr=.inf': train.lr = inf: should be a finite number",
    ),
    "larger than 64 bits": (
        ["train.seed=9223372036854775808"],
        "--set 'train.seed=9223372036854775808': train.seed = 9223372036854775808: "
        "should be less than or equal to 9223372036854775807",
    ),
    "more bytes than 64 bits": (
        ["memory.device_budget_bytes=10000PB"],
        "--set 'memory.device_budget_bytes=10000PB': memory.device_budget_bytes = '10000PB': "
        "should be less than or equal to 9223372036854775807",
    ),
    "nothing in float32": (
        ["train.lr=1e-40"],
        "--set 'train.lr=1e-40': train.lr = 1e-40: "
        "should be a number of float32, from 1.2e-38 to 3.4e+38",
    ),
    "infinite in float32": (
        ["train.max_grad_norm=1e39"],
        "--set 'train.max_grad_norm=1e39': train.max_grad_norm = 1e+39: "
        "should be a number of float32, from 1.2e-38 to 3.4e+38",
    ),
    "one in float32": (
        ["train.betas=[0.9, 0.99999999]"],
        "--set 'train.betas=[0.9, 0.99999999]': train.betas.1 = 0.99999999: "
        "should be less than or equal to 0.9999999",
    ),
    "a square beyond float32": (
        ["train.z_loss=2e18"],
        "--set 'train.z_loss=2e18': train.z_loss = 2e+18: "
        "should be less than or equal to 1000000000000000000",
    ),
    "more processes than a cluster": (
        ["cluster.optimizers=100000"],
        "--set 'cluster.optimizers=100000': cluster.optimizers = 100000: "
        "should be less than or equal to 16384",
    ),
    "more slots than memory": (
        ["memory.optimizer.slots=999999999999"],
        "--set 'memory.optimizer.slots=999999999999': memory.optimizer.slots = 999999999999: "
        "should be less than or equal to 1024",
    ),
    "a wait of months": (
        ["cluster.step_timeout_s=2592001"],
        "--set 'cluster.step_timeout_s=2592001': cluster.step_timeout_s = 2592001: "
        "should be less than or equal to 2592000",
    ),
    "infinite size of the model": (
        ["model.config.rope_parameters={full: {rope_theta: .inf}}"],
        "job.yaml with --set 'model.config.rope_parameters={full: {rope_theta: .inf}}': "
        "model.config: rope_parameters.full.rope_theta = inf: should be a finite number",
    ),
    "date in the model": (
        ["model.config.hidden_size=2020-01-01"],
        "job.yaml with --set 'model.config.hidden_size=2020-01-01': model.config: "
        "hidden_size = datetime.date(2020, 1, 1): should be text, a number, true, false or "
        "null",
    ),
    "model within itself": (
        ["model.config.layers=&all [1, *all]"],
        "job.yaml with --set 'model.config.layers=&all [1, *all]': model.config: "
        "layers is nested deeper than 64 levels",
    ),
    "number for a key": (
        ["train={1: 2}"],
        "--set 'train={1: 2}': train.1: the key should be text, in quotes where it looks like a "
        "number",
    ),
    "number for a key of the model": (
        ["model.config={1: 2}"],
        "--set 'model.config={1: 2}': model.config.1: the key should be text, in quotes where it "
        "looks like a number",
    ),
    "hexadecimal nothing": (
        ["train.steps=0x_"],
        "--set 'train.steps=0x_' is not valid YAML: invalid literal for int() with base 16: ''",
    ),
    "month that is none": (
        ["model.config.x=2020-13-01"],
        "--set 'model.config.x=2020-13-01' is not valid YAML: month must be in 1..12",
    ),
    "tag that does not suit": (
        ["train.steps=!!bool x"],
        "--set 'train.steps=!!bool x' is not valid YAML: 'x'",
    ),
    "tag without a value": (
        ["train.steps=!!int ''"],
        "--set \"train.steps=!!int ''\" is not valid YAML: string index out of range",
    ),
    "path that is none": (
        [r'runs_dir="a\0"'],
        "--set 'runs_dir=\"a\\\\0\"': runs_dir = 'a\\x00': should be a path that a file system can "
        "hold",
    ),
    "host that is none": (
        ["metrics.host=a..b"],
        "--set 'metrics.host=a..b': metrics.host = 'a..b': should be the name or address of a "
        "host, or node",
    ),
    "empty path": (
        ["data.source=''"],
        "--set \"data.source=''\": data.source = '': string should have at least 1 character",
    ),
    "unknown choice": (
        ["train.dtype=fp8"],
        "--set 'train.dtype=fp8': train.dtype = 'fp8': should be 'float32' or 'bfloat16'",
    ),
    "value for a section": (["train=3"], "--set 'train=3': train = 3: should be a section of keys"),
    "bad name": (
        ["run=My run"],
        "--set 'run=My run': run = 'My run': should start with a-z or 0-9 and go on with "
        "a-z, 0-9, '.', '_', '-'",
    ),
    "two problems": (
        ["train.steps=0", "train.betas=[0.9, 'x']"],
        "--set 'train.steps=0': train.steps = 0: should be greater than or equal to 1\n"
        "--set \"train.betas=[0.9, 'x']\": train.betas.1 = 'x': should be a valid number",
    ),
    "two models": (
        ["model.path=/x"],
        "job.yaml with --set 'model.path=/x': "
        "model: give exactly one of `path` and `config`, not both; "
        "`--set model.config=null` takes one out",
    ),
    "no model": (
        ["model.config=null"],
        "job.yaml with --set 'model.config=null': "
        "model: give exactly one of `path` and `config`, not neither; "
        "`--set model.config=null` takes one out",
    ),
    "no model type": (
        ["model.config={}"],
        "job.yaml with --set 'model.config={}': "
        "model: `config` needs `model_type`, for example model_type: qwen3_moe",
    ),
    "pretrained from nowhere": (
        ["model.weights=pretrained"],
        "job.yaml with --set 'model.weights=pretrained': "
        "model: weights: pretrained needs `path`; an inline `config` has none",
    ),
    "warm-up past the end": (
        ["train.schedule.warmup_steps=30", "train.lr=1", "run=step"],
        "job.yaml with --set 'train.schedule.warmup_steps=30': "
        "train: schedule.warmup_steps = 30 is past the end of the decay at step 20; "
        "use at most 20, or raise schedule.decay_steps",
    ),
    "degree": (
        ["cluster.workers=6", "parallel.expert=4"],
        "job.yaml with --set 'cluster.workers=6', --set 'parallel.expert=4': "
        "parallel.expert = 4 does not divide cluster.workers = 6; "
        "use one of [1, 2, 3, 6]",
    ),
    "sequence": (
        ["parallel.sequence=2", "train.sequence_length=1001"],
        "job.yaml with --set 'parallel.sequence=2', --set 'train.sequence_length=1001': "
        "train.sequence_length = 1001 is no multiple of parallel.sequence = 2; "
        "use 1000 or 1002",
    ),
    "batch": (
        ["parallel.sequence=1", "train.microbatches=3", "train.sequences_per_step=8"],
        "job.yaml with --set 'parallel.sequence=1', --set 'train.microbatches=3', "
        "--set 'train.sequences_per_step=8': "
        "train.sequences_per_step = 8 is no multiple of 6 = 2 sequence groups "
        "(cluster.workers / parallel.sequence) x 3 train.microbatches; use 6 or 12",
    ),
    "a log without a project": (
        ["logging.wandb.entity=team"],
        "job.yaml with --set 'logging.wandb.entity=team': "
        "logging.wandb: entity = team without `project`, so nothing is written; set it too",
    ),
    "no assignment": (
        ["train.steps"],
        "--set 'train.steps' is no assignment; write it like --set train.steps=20",
    ),
    "below a value": (
        ["train.steps.x=1"],
        "--set 'train.steps.x=1' goes below 20, which is a value, not a section",
    ),
    "override that is not YAML": (
        ["train.steps=[1"],
        "--set 'train.steps=[1' is not valid YAML (line 1, column 3): "
        "expected ',' or ']', but got '<stream end>'",
    ),
}


def test_bytes_may_carry_a_unit(tmp_path):
    budgets = "memory: {device_budget_bytes: 4GB, boundaries: {host_budget_bytes: 1.5 KiB}}"
    path = written(tmp_path, f"run: a\nmodel: {{path: x}}\n{budgets}\n")
    spec = load_spec(path, ["memory.dispatch.budget_bytes=512MiB"])
    assert spec.memory.device_budget_bytes == 4 * 10**9
    assert spec.memory.dispatch.budget_bytes == 512 * 2**20
    assert spec.memory.boundaries.host_budget_bytes == 1536
    assert load_spec(written(tmp_path, dump_spec(spec))) == spec


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7B", 7), ("3kB", 3000), ("3KB", 3000), ("2 TiB", 2 * 2**40), ("0.25PB", 25 * 10**13)],
)
def test_a_unit_is_a_power_of_1000_and_with_an_i_of_1024(tmp_path, text, nbytes):
    spec = with_overrides(tmp_path, f"memory.dispatch.budget_bytes={text}")
    assert spec.memory.dispatch.budget_bytes == nbytes


@pytest.mark.parametrize("text", ["4 gigabytes", "4Gb", "4iB", "-1GB", "1e3MB", "4XB", "'12'"])
def test_other_words_for_bytes_are_refused(tmp_path, text):
    value = text.strip("'")
    assert refusal(tmp_path, f"memory.device_budget_bytes={text}").endswith(
        f": memory.device_budget_bytes = {value!r}: should be bytes, like 4000000000, 4GB or 512MiB"
    )


def test_no_bytes_are_too_few_with_a_unit_too(tmp_path):
    assert refusal(tmp_path, "memory.dispatch.budget_bytes=0GB").endswith(
        "'0GB': should be greater than or equal to 1 or 'auto'"
    )


def test_a_problem_of_the_file_is_not_blamed_on_an_override_nor_one_on_the_other(tmp_path):
    path = written(tmp_path, "run: a\nmodel: {path: x}\ntrain: {steps: 0, lr: -1, seed: -2}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path, ["train.steps=5", "train.steps=-3", "data={sauce: x}", "run=b"])
    assert str(caught.value).replace(f"{tmp_path}/", "").splitlines() == [
        "--set 'data={sauce: x}': section `data` has no key `sauce`; the nearest is `data.source`",
        "--set 'train.steps=-3': train.steps = -3: should be greater than or equal to 1",
        "job.yaml: 2 problems",
        "  train.lr = -1: should be greater than 0",
        "  train.seed = -2: should be greater than or equal to 0",
    ]


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_the_problem_and_the_way_out(tmp_path, case):
    overrides, message = REFUSALS[case]
    assert refusal(tmp_path, *overrides) == message


@pytest.mark.parametrize(
    ("number", "digits"),
    [("9" * 5000, 5000), ("0x" + "f" * 5000, 6021), ("9" * 5000 + "_0", 5001)],
    ids=["decimal", "hexadecimal", "underscored"],
)
@pytest.mark.parametrize("sign", ["", "-"])
def test_a_number_that_python_does_not_write_is_refused_by_its_length(
    tmp_path, number, digits, sign
):
    text = refusal(tmp_path, f"train.steps={sign}{number}")
    bound = "greater than or equal to 1" if sign else "less than or equal to 9223372036854775807"
    assert text.endswith(f": train.steps = an integer of {digits} digits: should be {bound}")
    assert len(text) < 400
    text = refusal(tmp_path, f"model.config.hidden_size={sign}{number}")
    assert f"model.config: hidden_size = an integer of {digits} digits: should be a" in text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("opening", "closing"), [("[", "]"), ("{a: ", "}")], ids=["lists", "sections"]
)
def test_what_is_nested_deeper_than_64_levels_is_refused(tmp_path, opening, closing):
    text = refusal(tmp_path, f"model.config.x={opening * 5000}{closing * 5000}")
    assert text.endswith("it is nested deeper than 64 levels")
    assert "(line 1, column " in text
    path = written(tmp_path, "run: a\nmodel: {path: " + opening * 65 + closing * 65 + "}\n")
    with pytest.raises(SpecError, match=r"job.yaml is not valid YAML \(line 2, .* than 64 levels"):
        load_spec(path)
    inner = 60  # and the levels of the spec around it
    with_overrides(tmp_path, f"model.config.x={opening * inner}{closing * inner}")


def test_a_missing_key_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"job.yaml: run: is required$"):
        load_spec(written(tmp_path, "model: {path: x}"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"nofile.yaml: No such file.*flatpeak init"):
        load_spec(tmp_path / "nofile.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [", "not valid YAML"),
        ("run: a\nrun: b\n", "the key `run` is given twice"),
        ("- 1\n- 2\n", "should be a section of keys"),
        ("just words", "should be a section of keys"),
        ("", "run: is required"),
    ],
    ids=["broken", "repeated key", "list", "string", "empty"],
)
def test_a_file_that_is_no_job_is_refused(tmp_path, text, message):
    with pytest.raises(SpecError, match=message):
        load_spec(written(tmp_path, text))


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8 text"):
        load_spec(path)


@pytest.mark.parametrize(
    ("workers", "experts", "expected"), [(1, 8, 1), (4, 8, 4), (6, 4, 3), (8, 3, 2)]
)
def test_auto_takes_the_largest_expert_degree_that_the_model_allows(workers, experts, expected):
    spec = parse_spec(
        SMALLEST | {"cluster": {"workers": workers}, "train": {"sequences_per_step": 24}}
    )
    parallel = resolve_parallel(spec, experts=experts, heads=8).parallel
    assert (parallel.sequence, parallel.expert, parallel.vocabulary) == (1, expected, workers)


def test_resolving_keeps_what_the_job_chose():
    chosen = {"sequence": 2, "expert": 1, "vocabulary": 2}
    spec = parse_spec(SMALLEST | {"cluster": {"workers": 4}, "parallel": chosen})
    assert resolve_parallel(spec, experts=8, heads=8) == spec


def test_resolving_checks_the_batch_that_auto_had_put_off():
    spec = parse_spec(SMALLEST | {"cluster": {"workers": 3}})
    with pytest.raises(SpecError, match=r"sequences_per_step = 8 .* use 6 or 9"):
        resolve_parallel(spec, experts=8, heads=8)


@pytest.mark.parametrize(
    ("degrees", "problem"),
    [({"sequence": 4}, "6 attention heads"), ({"expert": 4}, "3 experts")],
    ids=["heads", "experts"],
)
def test_resolving_refuses_a_chosen_degree_that_does_not_suit_the_model(degrees, problem):
    spec = parse_spec(SMALLEST | {"cluster": {"workers": 4}, "parallel": degrees})
    with pytest.raises(SpecError, match=f"does not suit the model's {problem}; .* one of"):
        resolve_parallel(spec, experts=3, heads=6)


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        (
            {"sequence": 4},
            {"attention_heads": 6},
            "parallel.sequence = 4 does not suit the model's 6 attention heads; "
            "with cluster.workers = 4 use one of [1, 2]",
        ),
        (
            {"sequence": 4},
            {"attention_heads": 12, "key_value_heads": 6},
            "parallel.sequence = 4 does not suit the model's 12 attention heads and "
            "6 key-value heads; with cluster.workers = 4 use one of [1, 2]",
        ),
        (
            {"expert": 4},
            {"experts": 3},
            "parallel.expert = 4 does not suit the model's 3 experts; "
            "with cluster.workers = 4 use one of [1, 2]",
        ),
    ],
    ids=["heads", "key-value heads", "experts"],
)
def test_a_degree_that_does_not_suit_the_model_is_refused(parallel, model, message):
    degrees = {"sequence": 1, "expert": 1, "vocabulary": 1} | parallel
    spec = parse_spec(SMALLEST | {"cluster": {"workers": 4}, "parallel": degrees})
    shape = {"experts": 8, "attention_heads": 8} | model
    with pytest.raises(SpecError) as caught:
        check_against_model(spec, **shape)
    assert str(caught.value) == message


def test_key_value_heads_may_be_fewer_than_the_ranks_that_share_a_sequence():
    degrees = {"sequence": 4, "expert": 1, "vocabulary": 4}
    spec = parse_spec(SMALLEST | {"cluster": {"workers": 4}, "parallel": degrees})
    check_against_model(spec, experts=8, attention_heads=8, key_value_heads=2)


@pytest.mark.parametrize("number", [1, 2, 12, 16, 97])
def test_divisors_are_all_of_them_ascending(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_the_divisors_of_a_huge_number_of_workers_come_at_once():
    assert len(divisors(10**9)) == 100
    assert divisors(10**9)[-2:] == [5 * 10**8, 10**9]


def test_overrides_that_go_deeper_than_any_setting_are_refused(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text("run: x\n")
    with pytest.raises(SpecError, match="deeper than 64 levels"):
        load_spec(path, [".".join(["a"] * 5000) + "=1"])


def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path):
    path = tmp_path / "job.yaml"
    lines = ["  a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for level in range(1, 12):
        inner = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"  a{level}: &a{level} [{inner}]")
    path.write_text("run: x\nmodel: {config: {\n" + ",\n".join(lines) + "}}\n")
    with pytest.raises(SpecError, match="more than 100,000 values"):
        load_spec(path)


def test_many_unknown_keys_are_counted_and_strange_ones_quoted(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text("run: x\n" + "".join(f"key{n}: 1\n" for n in range(500)) + '"\\e[31m": 1\n')
    with pytest.raises(SpecError) as refused:
        load_spec(path)
    assert "and 482 more" in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert str(refused.value).count("\n") <= 22
