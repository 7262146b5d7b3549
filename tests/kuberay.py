"""What KubeRay takes of the manifests in `deploy/`: the fields of its ray.io/v1 that they use.

Written after the API types and the operator's own validation in KubeRay 1.7. A field that is not
here is refused, also one that KubeRay would take; pod templates are for the schemas of Kubernetes.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# The names of pods are made from it, and must not be cut.
_Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=47)]
_Count = Annotated[int, Field(ge=0)]


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(_Object):
    name: _Name


class PodTemplate(_Object):
    metadata: dict[str, Any]
    spec: dict[str, Any]

    @property
    def pod(self) -> dict[str, Any]:
        """The pod that this makes, but for its name."""
        return {"apiVersion": "v1", "kind": "Pod", "metadata": self.metadata, "spec": self.spec}

    @property
    def container(self) -> dict[str, Any]:
        return self.spec["containers"][0]

    def volume(self, mount_path: str) -> dict[str, Any]:
        """What is mounted there in the first container."""
        (name,) = [
            mount["name"]
            for mount in self.container["volumeMounts"]
            if mount["mountPath"] == mount_path
        ]
        (volume,) = [volume for volume in self.spec["volumes"] if volume["name"] == name]
        return volume


class HeadGroup(_Object):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: _Count
    minReplicas: _Count
    maxReplicas: _Count
    idleTimeoutSeconds: _Count | None = None

    @model_validator(mode="after")
    def replicas_are_within_their_bounds(self) -> Self:
        assert self.minReplicas <= self.replicas <= self.maxReplicas, self.groupName
        return self


class AuthOptions(_Object):
    mode: Literal["token", "disabled"]
    secretName: str


class AutoscalerOptions(_Object):
    version: Literal["v1", "v2"]


class Cluster(_Object):
    rayVersion: str
    authOptions: AuthOptions
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]

    @model_validator(mode="after")
    def idle_timeouts_of_groups_are_for_the_second_autoscaler(self) -> Self:
        options = self.autoscalerOptions
        second = self.enableInTreeAutoscaling and options is not None and options.version == "v2"
        for group in self.workerGroupSpecs:
            assert group.idleTimeoutSeconds is None or second, group.groupName
        return self

    @property
    def templates(self) -> list[PodTemplate]:
        return [group.template for group in (self.headGroupSpec, *self.workerGroupSpecs)]


class RayCluster(_Object):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: Cluster

    @property
    def cluster(self) -> Cluster:
        return self.spec


class Job(_Object):
    entrypoint: str
    backoffLimit: _Count
    shutdownAfterJobFinishes: Literal[True]  # ttlSecondsAfterFinished says nothing without
    ttlSecondsAfterFinished: _Count
    rayClusterSpec: Cluster


class RayJob(_Object):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: Job

    @property
    def cluster(self) -> Cluster:
        return self.spec.rayClusterSpec


KINDS: dict[str, type[RayCluster] | type[RayJob]] = {"RayCluster": RayCluster, "RayJob": RayJob}
