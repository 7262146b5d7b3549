"""The image, the compose file for one machine, and what Grafana is provisioned with."""

import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from compose_spec import PyCompose

from deployed import (
    DEPLOY,
    IMAGE,
    PINS,
    PROJECT,
    ROOT,
    commands,
    documents,
    gibibytes_said,
    is_pinned,
    nbytes,
)
from deployed_plan import host_bytes, job_of
from dockerfile import Instruction, instructions
from flatpeak.controller.cli import app
from flatpeak.controller.cluster import OBJECT_STORE_BYTES
from flatpeak.controller.dashboards.grafana import FOLDER_UID
from flatpeak.controller.spec_file import load_spec
from flatpeak.workers.settings import check_dispatch_budget

DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
JOB = DEPLOY / "compose" / "job.yaml"
PROVISIONING = DEPLOY / "grafana" / "provisioning"


def stages() -> dict[str, list[Instruction]]:
    """By name, the last one "": each begins with what its base has done."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for instruction in instructions(DOCKERFILE):
        if instruction.name == "FROM":
            base, *name = instruction.arguments.split(" AS ")
            current = found[name[0] if name else ""] = [instruction, *found.get(base, [])]
        else:
            current.append(instruction)
    return found


def copied() -> list[str]:
    """What comes out of the source folder."""
    return [
        source
        for instruction in instructions(DOCKERFILE)
        if instruction.name == "COPY" and "--from" not in instruction.arguments
        for source in instruction.words[:-1]
    ]


def installed(stage: list[Instruction], command: str) -> set[str]:
    """The packages that a stage has from its `RUN`s with `command`, without their extras."""
    found = set()
    for run in (each.arguments for each in stage if each.name == "RUN"):
        for asked in re.findall(rf"{command} (.*?)(?: &&|$)", run):
            words = (word.strip('"') for word in asked.split() if word[0] != "-")
            found |= {re.sub(r"\[.*", "", word) for word in words}
    return found


def test_the_image_copies_what_there_is_and_what_the_wheel_is_made_of():
    for source in copied():
        assert (ROOT / source).exists(), source
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    needed = {Path(each).parts[0] for each in build["targets"]["wheel"]["only-include"]}
    needed |= {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml"}
    assert needed <= set(copied())


def test_what_is_copied_is_sent_to_the_build_and_nothing_else():
    first, *rules = (DOCKERFILE.with_name("Dockerfile.dockerignore")).read_text().split()
    assert first == "*"
    sent = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    left_out = [rule for rule in rules if not rule.startswith("!")]
    assert sorted(sent) == sorted(copied())
    assert not [source for source in copied() for rule in left_out if fnmatch(source, rule)]


def test_every_version_is_that_of_the_constraints():
    for stage in stages().values():
        seen = ""
        for instruction in stage:
            if instruction.name == "RUN" and re.search(
                r"\bpip (install|wheel)\b", instruction.arguments
            ):
                assert "PIP_CONSTRAINT=/opt/constraints.txt" in seen
                assert "constraints.txt /opt/constraints.txt" in seen
                assert not re.search(r"==|>=|~=", instruction.arguments)
            seen += f"{instruction.arguments}\n"
    packages = installed(stages()[""], "pip install")
    assert {"ray", "torch", "triton", "transformers"} <= packages
    assert {name for name in packages if name.isalpha()} <= set(PINS)


def test_the_wheel_is_installed_with_extras_that_it_has():
    (extras,) = re.findall(r"flatpeak-\*\.whl\)\[(.*?)\]", DOCKERFILE.read_text())
    assert {"tensorboard", "wandb"} == set(extras.split(","))
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_image_has_what_kernels_are_built_with():
    # kernels/adamw/build.py takes c++, g++ or clang++; Triton's launchers include Python.h.
    assert {"g++", "python3-dev"} <= installed(stages()[""], "apt-get install")


def test_the_base_is_pinned_and_compared_with_the_cuda_of_torch():
    bases = [each.words[0] for each in instructions(DOCKERFILE) if each.name == "FROM"]
    assert [base for base in bases if base not in stages()] == [
        "nvidia/cuda:${CUDA_VERSION}-base-ubuntu24.04"
    ]
    (cuda,) = re.findall(r"^ARG CUDA_VERSION=(.*)$", DOCKERFILE.read_text(), re.M)
    assert re.fullmatch(r"\d+\.\d+\.\d+", cuda)


@pytest.mark.parametrize(
    ("built", "said"),
    [("13.0", ""), ("12.8", "torch is built for 12.8"), (None, "torch is built for no CUDA")],
)
def test_a_torch_for_another_cuda_than_the_base_ends_the_build(
    tmp_path: Path, built: str | None, said: str
):
    (tmp_path / "torch.py").write_text(f"class version:\n    cuda = {built!r}\n")
    (check,) = [
        each.arguments
        for each in instructions(DOCKERFILE)
        if each.name == "RUN" and "torch.version.cuda" in each.arguments
    ]
    environment = {
        "CUDA_VERSION": "13.0.1",
        "PATH": str(Path(sys.executable).parent),
        "PYTHONPATH": str(tmp_path),
    }
    done = subprocess.run(
        ["/bin/sh", "-c", check], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode == 0) == (said == "")
    assert said in done.stderr


def services() -> dict[str, dict[str, Any]]:
    return documents(COMPOSE)[0]["services"]


def volumes(service: dict[str, Any]) -> dict[str, str]:
    """By the path in the container what is there."""
    mounts = (volume.split(":") for volume in service["volumes"])
    return {inside: source for source, inside, *_ in mounts}


def test_the_compose_file_is_valid_and_a_slip_in_it_is_found():
    text = COMPOSE.read_text()
    compose = PyCompose.from_yaml(text)
    assert sorted(compose.service_names()) == ["grafana", "prometheus", "train"]
    with pytest.raises(ValueError, match="shm_sise"):
        PyCompose.from_yaml(text.replace("shm_size", "shm_sise"))


def test_its_images_are_pinned_and_its_mounts_are_there():
    for service in services().values():
        assert is_pinned(service["image"])
        for source in volumes(service).values():
            named = source in documents(COMPOSE)[0]["volumes"]
            assert named or (COMPOSE.parent / source).exists(), source
    assert services()["train"]["image"] == IMAGE
    built = [command for command in commands(COMPOSE) if command[:2] == ["docker", "build"]]
    assert built == commands(DOCKERFILE)
    assert IMAGE in built[0]


def test_everything_listens_on_loopback_alone():
    job = load_spec(JOB)
    (scraped,) = documents(DEPLOY / "prometheus" / "prometheus.yaml")[0]["scrape_configs"]
    (found,) = scraped["http_sd_configs"]
    assert found["url"] == f"http://{job.metrics.host}:{job.metrics.port}/targets"
    assert job.metrics.host == "127.0.0.1"
    assert job.cluster.address == "local"
    assert "--web.listen-address=127.0.0.1:9090" in services()["prometheus"]["command"]
    grafana = services()["grafana"]["environment"]
    assert grafana["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert grafana["PROMETHEUS_URL"] == "http://127.0.0.1:9090"
    for service in services().values():
        assert service["network_mode"] == "host"
        assert "ports" not in service


def test_the_machine_gives_the_run_what_it_asks_for():
    spec, model = job_of(JOB)
    check_dispatch_budget(spec, model)
    train = services()["train"]
    (devices,) = train["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == spec.cluster.workers
    here = ["here"]
    planned = host_bytes(
        spec,
        model,
        workers=here * spec.cluster.workers,
        optimizers=here * spec.cluster.optimizers,
    )["here"]
    needed = planned + OBJECT_STORE_BYTES
    assert needed <= nbytes(train["shm_size"]) <= 1.15 * needed
    assert gibibytes_said(COMPOSE) == [round(planned / 2**30, 1)]
    assert train["ulimits"]["memlock"] == -1


def test_the_run_of_the_compose_file_is_started_on_its_job():
    train = services()["train"]
    program, command, path, *options = train["command"].split()
    known = {each.name or each.callback.__name__ for each in app.registered_commands}
    assert (program, options) == ("flatpeak", ["--resume"])
    assert command in known
    assert volumes(train)[path] == "./job.yaml"
    kept = [inside for inside, source in volumes(train).items() if source == "runs"]
    for folder in (load_spec(JOB).runs_dir, load_spec(JOB).data.cache_dir):
        assert any(Path(folder).is_relative_to(inside) for inside in kept)


def test_grafana_is_provisioned_with_the_dashboards_and_their_data_source():
    (source,) = documents(PROVISIONING / "datasources" / "prometheus.yaml")[0]["datasources"]
    assert source["url"] == "$PROMETHEUS_URL"
    for path in (ROOT / "dashboards").glob("*.json"):
        variables = json.loads(path.read_text())["templating"]["list"]
        (chosen,) = [each for each in variables if each["type"] == "datasource"]
        assert chosen["query"] == source["type"]
    (provider,) = documents(PROVISIONING / "dashboards" / "flatpeak.yaml")[0]["providers"]
    assert provider["folderUid"] == FOLDER_UID
    mounts = volumes(services()["grafana"])
    assert mounts[provider["options"]["path"]] == "../../dashboards"
    for kind in ("datasources", "dashboards"):
        assert mounts[f"/etc/grafana/provisioning/{kind}"] == f"../grafana/provisioning/{kind}"
