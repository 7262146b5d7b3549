"""The Ray that a run uses: what can be checked before it, one of our own, or one that is there."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import torch

from flatpeak.controller.host_plan import STATE_BYTES
from flatpeak.controller.runs import RunEvent, event
from flatpeak.controller.spec import ClusterSpec, Spec
from flatpeak.controller.spec_values import shown
from flatpeak.workers.errors import ClusterError, DoesNotFit, SpecError
from flatpeak.workers.host_memory import node_path, room
from flatpeak.workers.metrics import NODE

NAMESPACE = "flatpeak"
_CONNECT_S = 5.0
OBJECT_STORE_BYTES = 256 * 2**20  # tensors do not travel through it
_PROCESSES_PER_CORE = 64


def check_cluster(spec: Spec, *, parameters: int) -> None:
    """Refuses what cannot work where the run is to live, as far as this machine can tell.

    Raises SpecError, DoesNotFit, or ClusterError when no cluster answers at the address.
    """
    cluster = spec.cluster
    if cluster.address != "local":
        _check_address(cluster.address)
        return
    _check_gpus(cluster)
    _check_processes(cluster)
    _check_shared_memory(cluster, parameters)
    _check_port("cluster.rendezvous_port", "127.0.0.1", cluster.rendezvous_port)
    metrics = spec.metrics
    if metrics.export and metrics.host != NODE:
        _check_port("metrics.port", metrics.host, metrics.port)


@contextmanager
def connected(spec: Spec) -> Iterator[list[RunEvent]]:
    """Inside, Ray is connected: one of our own for address "local", else the one that is there.

    Yields warnings about the machine. Both ends are silent on standard error.
    """
    if ray.is_initialized():
        raise ClusterError("this process is connected to a Ray already; call ray.shutdown() first")
    try:
        if spec.cluster.address == "local":
            _start_local(spec.cluster)
            yield _warnings(spec.cluster)
        else:
            _connect(spec.cluster.address)
            yield []
    finally:
        ray.shutdown()


def _start_local(cluster: ClusterSpec) -> None:
    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            # Of the machine, or as if it had those that scaling may ask for.
            num_cpus=max(_cores_asked(cluster, optimizers=cluster.arenas), _cores_here()),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # Ray raises many types here, all of them mean: not started
        raise ClusterError(f"cannot start Ray on this machine: {error}") from error


def _warnings(cluster: ClusterSpec) -> list[RunEvent]:
    asked, here = _cores_asked(cluster, optimizers=cluster.optimizers), _cores_here()
    if asked <= here:
        return []
    text = (
        f"{cluster.workers} workers x {cluster.cpus_per_worker} and {cluster.optimizers} optimizer "
        f"actors x {cluster.cpus_per_optimizer} ask for {asked} cores, this machine has {here}: "
        "steps will be slower"
    )
    return [event("warning", text=text)]


def _cores_asked(cluster: ClusterSpec, *, optimizers: int) -> int:
    return cluster.workers * cluster.cpus_per_worker + optimizers * cluster.cpus_per_optimizer


def _cores_here() -> int:
    return os.cpu_count() or 1


def _connect(address: str) -> None:
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises many types here, all of them mean: not connected
        raise ClusterError(
            f"cannot join the Ray cluster at {address}: {error}; if it asks for a token, set "
            "RAY_AUTH_MODE=token and have the token in ~/.ray/auth_token"
        ) from error


def _check_address(address: str) -> None:
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise SpecError(
            f"cluster.address = {shown(address)} is no address; give host:port of the head of a "
            "Ray cluster, auto to find one, or local to start one here"
        )
    # Ray retries a dead address for minutes; a plain connection answers at once.
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        raise ClusterError(
            f"no Ray cluster answers at cluster.address = {address}: {error}; give host:port "
            "of its head, or local to start one here"
        ) from None


def _check_gpus(cluster: ClusterSpec) -> None:
    gpus = torch.cuda.device_count()
    if cluster.device == "cuda" and gpus < cluster.workers:
        raise SpecError(
            f"cluster.device = cuda needs a GPU for each of cluster.workers = {cluster.workers}, "
            f"this machine has {gpus}; set cluster.device to cpu, or cluster.address to a cluster"
        )


def _check_processes(cluster: ClusterSpec) -> None:
    # Each is a Python process with torch: hundreds of megabytes, and seconds of a core to start.
    asked, most = cluster.workers + cluster.optimizers, _PROCESSES_PER_CORE * _cores_here()
    if asked > most:
        raise SpecError(
            f"cluster.workers = {cluster.workers} and cluster.optimizers = {cluster.optimizers} "
            f"are more processes than the {_cores_here()} cores of this machine can start in time; "
            f"use at most {most} together, or set cluster.address to a cluster"
        )


def _check_shared_memory(cluster: ClusterSpec, parameters: int) -> None:
    folder = node_path(cluster.shm_dir)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise SpecError(
            f"cluster.shm_dir = {folder} is no directory that can be written; "
            "/dev/shm is the one to use where it is large enough"
        )
    needed = parameters * STATE_BYTES
    left = room(folder)
    if needed > left.nbytes:
        raise DoesNotFit(
            f"the arenas take at least {needed:,} bytes, {STATE_BYTES} for each of "
            f"{parameters:,} parameters, in cluster.shm_dir = {folder}, and {left.where} has "
            f"{left.nbytes:,} free; use a folder or a limit with more, or a cluster of more nodes"
        )


def _check_port(setting: str, host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SpecError(
                f"{setting} = {port} cannot be had at {host} of this machine: {reason}; "
                "0 takes any free port"
            ) from None
