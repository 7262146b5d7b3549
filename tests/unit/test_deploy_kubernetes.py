"""The manifests: valid by the schemas, and of one mind with each other and with the code."""

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from pydantic import ValidationError

from deployed import (
    DEPLOY,
    IMAGE,
    PINS,
    ROOT,
    commands,
    documents,
    gibibytes_said,
    is_pinned,
    nbytes,
)
from deployed_plan import host_bytes, job_of
from flatpeak.controller.cli import app
from flatpeak.controller.placement import homes_anywhere
from flatpeak.controller.spec_file import load_spec
from flatpeak.workers.settings import check_dispatch_budget
from kuberay import KINDS, Cluster, WorkerGroup

KUBERNETES = "1.33"
FOLDER = DEPLOY / "kubernetes"
JOB = FOLDER / "job.yaml"
RAY_FILES = [FOLDER / "rayjob.yaml", FOLDER / "raycluster.yaml"]
FILES = [*RAY_FILES, FOLDER / "monitoring.yaml", FOLDER / "storage.yaml"]
GPU = "nvidia.com/gpu"
MIB = 2**20


def validate(document: dict[str, Any]) -> None:
    if document["apiVersion"] != "ray.io/v1":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    resource = KINDS[document["kind"]].model_validate(document)
    for template in resource.cluster.templates:
        kubernetes_validate.validate(template.pod, KUBERNETES, strict=True)


def cluster_of(path: Path) -> Cluster:
    (document,) = documents(path)
    return KINDS[document["kind"]].model_validate(document).cluster


def groups(cluster: Cluster) -> tuple[WorkerGroup, WorkerGroup]:
    """Of GPU workers and of optimizer actors."""
    gpu, cpu = cluster.workerGroupSpecs
    assert (gpu.groupName, cpu.groupName) == ("gpu-workers", "cpu-optimizers")
    return gpu, cpu


def monitoring(kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        document
        for document in documents(FOLDER / "monitoring.yaml")
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    ]
    return found


def pods(path: Path) -> list[dict[str, Any]]:
    """The specs of all pods that a file makes."""
    if path in RAY_FILES:
        return [template.spec for template in cluster_of(path).templates]
    return [
        document["spec"]["template"]["spec"]
        for document in documents(path)
        if document["kind"] == "Deployment"
    ]


def test_every_manifest_is_listed_here():
    assert sorted([*FILES, JOB]) == sorted(FOLDER.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_manifest_is_valid(path: Path):
    for document in documents(path):
        validate(document)


def test_a_slip_in_a_manifest_is_found():
    (good,) = documents(RAY_FILES[0])
    cluster = ("spec", "rayClusterSpec")
    worker = (*cluster, "workerGroupSpecs", 0)
    for path, key, value in (
        (("spec",), "entryPoint", "flatpeak"),
        (worker, "minReplicas", 3),
        (worker, "idleTimeoutSeconds", 600),  # without an autoscaler
        ((*cluster, "authOptions"), "mode", "on"),
        ((*worker, "template", "spec", "volumes", 0, "emptyDir"), "sizelimit", "1Gi"),
        ((*worker, "template", "spec", "containers", 0), "resources", {"limits": [1]}),
    ):
        bad: Any = copy.deepcopy(good)
        at = bad
        for step in path:
            at = at[step]
        at[key] = value
        with pytest.raises((ValidationError, kubernetes_validate.ValidationError)):
            validate(bad)


def test_both_clusters_are_the_same_but_for_the_size_of_the_group_of_cpus():
    one, staying = (cluster_of(path).model_dump() for path in RAY_FILES)
    assert (staying.pop("enableInTreeAutoscaling"), one.pop("enableInTreeAutoscaling")) == (1, 0)
    assert (staying.pop("autoscalerOptions"), one.pop("autoscalerOptions"))[1] is None
    (_, few), (_, many) = one["workerGroupSpecs"], staying["workerGroupSpecs"]
    many |= {name: few[name] for name in ("maxReplicas", "idleTimeoutSeconds")}
    assert one == staying


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_images_are_pinned_and_the_projects_own_is_the_one_that_is_built(path: Path):
    images = [container["image"] for pod in pods(path) for container in pod["containers"]]
    assert all(map(is_pinned, images))
    assert {image for image in images if image.startswith("flatpeak")} <= {IMAGE}


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda path: path.stem)
def test_ray_is_the_one_that_the_image_installs_and_asks_for_its_token(path: Path):
    cluster = cluster_of(path)
    assert cluster.rayVersion == PINS["ray"]
    assert cluster.authOptions.mode == "token"


def test_prometheus_finds_the_run_where_the_job_serves_it():
    metrics = load_spec(JOB).metrics
    service = monitoring("Service", "flatpeak-metrics")["spec"]
    (port,) = service["ports"]
    assert port["port"] == metrics.port
    assert metrics.host == "node"
    for path in RAY_FILES:
        cluster = cluster_of(path)
        head, *others = cluster.templates
        assert {"name": port["targetPort"], "containerPort": metrics.port} in head.container[
            "ports"
        ]
        assert service["selector"].items() <= head.metadata["labels"].items()
        for other in others:
            assert not service["selector"].items() <= other.metadata["labels"].items()
    (scraped,) = documents(DEPLOY / "prometheus" / "kubernetes.yaml")[0]["scrape_configs"]
    (found,) = scraped["http_sd_configs"]
    assert found["url"] == f"http://flatpeak-metrics:{metrics.port}/targets"


def test_the_job_and_prometheus_read_the_token_where_it_is_mounted():
    (key,) = keys_of("secret", "flatpeak-metrics-token")
    for path in RAY_FILES:
        head = cluster_of(path).headGroupSpec.template
        token = Path(str(load_spec(JOB).metrics.token_file))
        volume = head.volume(str(token.parent))
        assert (volume["secret"]["secretName"], token.name) == ("flatpeak-metrics-token", key)
    (scraped,) = documents(DEPLOY / "prometheus" / "kubernetes.yaml")[0]["scrape_configs"]
    for asks in (scraped, *scraped["http_sd_configs"]):
        token = Path(asks["authorization"]["credentials_file"])
        assert (mounted("flatpeak-prometheus", token.parent), token.name) == (
            {"secret": {"secretName": "flatpeak-metrics-token"}},
            key,
        )


def test_grafana_finds_prometheus_and_what_is_provisioned():
    (port,) = monitoring("Service", "flatpeak-prometheus")["spec"]["ports"]
    (container,) = monitoring("Deployment", "flatpeak-grafana")["spec"]["template"]["spec"][
        "containers"
    ]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["PROMETHEUS_URL"] == f"http://flatpeak-prometheus:{port['port']}"
    (provider,) = documents(DEPLOY / "grafana/provisioning/dashboards/flatpeak.yaml")[0][
        "providers"
    ]
    shown = mounted("flatpeak-grafana", Path(provider["options"]["path"]))
    assert shown == {"configMap": {"name": "flatpeak-dashboards"}}
    for kind, name in (("datasources", "datasources"), ("dashboards", "providers")):
        folder = Path("/etc/grafana/provisioning") / kind
        assert mounted("flatpeak-grafana", folder) == {
            "configMap": {"name": f"flatpeak-grafana-{name}"}
        }


def mounted(deployment: str, folder: Path) -> dict[str, Any]:
    """The volume that a deployment has at `folder`, without its name."""
    pod = monitoring("Deployment", deployment)["spec"]["template"]["spec"]
    names = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    return volumes[names[str(folder)]]


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda path: path.stem)
def test_workers_get_the_gpus_and_optimizer_actors_the_other_nodes(path: Path):
    spec, cluster = load_spec(JOB), cluster_of(path)
    gpu, cpu = groups(cluster)
    limits = gpu.template.container["resources"]["limits"]
    assert gpu.replicas * int(limits[GPU]) == spec.cluster.workers
    assert GPU not in cpu.template.container["resources"]["limits"]
    cores = {
        f"{group.groupName}-{index}": float(group.rayStartParams["num-cpus"])
        for group in (gpu, cpu)
        for index in range(group.replicas)
    } | {"head": float(cluster.headGroupSpec.rayStartParams["num-cpus"])}
    workers = Counter({f"gpu-workers-{n}": int(limits[GPU]) for n in range(gpu.replicas)})
    assert homes_anywhere(spec.cluster, workers, cores) == [
        "cpu-optimizers-0",
        "cpu-optimizers-1",
    ] * (spec.cluster.optimizers // cpu.replicas)
    for group in (gpu, cpu):
        assert (
            group.rayStartParams["num-cpus"]
            == group.template.container["resources"]["limits"]["cpu"]
        )


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda path: path.stem)
def test_shared_memory_has_room_for_what_the_plan_says_and_not_much_more(path: Path):
    spec, model = job_of(JOB)
    gpu, cpu = groups(cluster_of(path))
    per_node = spec.cluster.workers // gpu.replicas
    planned = host_bytes(
        spec,
        model,
        workers=[f"gpu-{rank // per_node}" for rank in range(spec.cluster.workers)],
        optimizers=[f"cpu-{n % cpu.replicas}" for n in range(spec.cluster.optimizers)],
    )
    said = []
    for group, node in ((gpu, "gpu-0"), (cpu, "cpu-0")):
        shm = group.template.volume(spec.cluster.shm_dir)["emptyDir"]
        assert shm["medium"] == "Memory"
        needed = planned[node] + int(group.rayStartParams["object-store-memory"])
        assert needed <= nbytes(shm["sizeLimit"]) <= 1.1 * needed
        # It counts towards the limit of the container, whose processes take some GiB each besides.
        processes = spec.cluster.workers // gpu.replicas if group is gpu else 2
        memory = nbytes(group.template.container["resources"]["limits"]["memory"])
        assert memory >= nbytes(shm["sizeLimit"]) + processes * 8 * 1024 * MIB
        said.append(round(planned[node] / 2**30, 1))
    assert gibibytes_said(path) == said


def test_the_job_loads_and_its_dispatch_budget_holds_for_any_routing():
    spec, model = job_of(JOB)
    check_dispatch_budget(spec, model)
    assert spec.cluster.optimizer_placement == "anywhere"
    assert Path(spec.runs_dir).is_relative_to("/flatpeak")


def test_the_volume_has_room_for_the_snapshots_of_the_job():
    spec, model = job_of(JOB)
    (claim,) = documents(FOLDER / "storage.yaml")
    snapshot = 12 * sum(weight.numel() for weight in model.parameters())
    room = nbytes(claim["spec"]["resources"]["requests"]["storage"])
    assert (spec.snapshots.keep + 1) * snapshot <= room
    text = (FOLDER / "storage.yaml").read_text()
    assert f"{spec.snapshots.keep + 1} x {round(snapshot / 1e9)} GB" in text


def created(path: Path) -> dict[tuple[str, str], list[str]]:
    """By kind and name the keys of the objects that the commands on top of a file create."""
    found = {}
    for words in commands(path):
        if words[:2] != ["kubectl", "create"]:
            continue
        kind, rest = words[2], words[3:]
        name, *options = rest[1:] if kind == "secret" else rest
        found[kind, name] = [key for option in options for key in keys_in(option)]
    return found


def keys_in(option: str) -> list[str]:
    kind, _, given = option.partition("=")
    key, _, source = given.rpartition("=") if kind == "--from-file" else given.partition("=")
    if kind == "--from-literal":
        return [key]
    path = ROOT / source
    assert path.exists(), source
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
    assert sum(each.stat().st_size for each in files) < MIB  # the most of a ConfigMap
    return [key or each.name for each in files]


def keys_of(kind: str, name: str) -> list[str]:
    return next(
        keys for path in FILES for made, keys in created(path).items() if made == (kind, name)
    )


def test_what_the_pods_refer_to_is_made_by_a_command_on_top_or_a_manifest():
    made = {name for path in FILES for name in created(path)}
    made |= {
        (document["kind"], document["metadata"]["name"])
        for path in FILES
        for document in documents(path)
    }
    for path in FILES:
        for volume in (volume for pod in pods(path) for volume in pod["volumes"]):
            match volume:
                case {"configMap": {"name": name}}:
                    assert ("configmap", name) in made
                case {"secret": {"secretName": name}}:
                    assert ("secret", name) in made
                case {"persistentVolumeClaim": {"claimName": name}}:
                    assert ("PersistentVolumeClaim", name) in made
                case {"emptyDir": _}:
                    pass
                case _:
                    raise AssertionError(f"{path.name} has a volume of another kind: {volume}")
    assert keys_of("secret", "flatpeak-ray-token") == ["auth_token"]  # as KubeRay wants it
    assert keys_of("secret", "flatpeak-grafana") == ["admin-password"]
    assert keys_of("configmap", "flatpeak-prometheus") == ["prometheus.yaml", "rules.yaml"]
    assert len(keys_of("configmap", "flatpeak-dashboards")) == 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_commands_on_top_name_files_and_commands_that_exist(path: Path):
    words = [word for command in commands(path) for word in command]
    assert words
    for word in words:
        if re.match(r"deploy/\S+\.yaml$", word):
            assert (ROOT / word).is_file(), word


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda path: path.stem)
def test_flatpeak_is_called_by_commands_that_it_has_on_files_that_are_mounted(path: Path):
    (document,) = documents(path)
    calls = [command[command.index("flatpeak") :] for command in commands(path) if "--" in command]
    if entrypoint := document["spec"].get("entrypoint"):
        calls.append(entrypoint.split())
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert {call[1] for call in calls} == {"train", "stop"} <= known
    head = cluster_of(path).headGroupSpec.template
    (job,) = {Path(call[2]) for call in calls if call[1] == "train"}
    assert head.volume(str(job.parent))["configMap"]["name"] == "flatpeak-job"
    assert keys_of("configmap", "flatpeak-job") == [job.name]
    (stopped,) = {tuple(call[2:]) for call in calls if call[1] == "stop"}
    spec = load_spec(JOB)
    assert stopped == (spec.run, "--runs-dir", spec.runs_dir)
