"""A Ray of several nodes on this machine, each with an arena folder of its own."""

import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from driven_run import SOURCE_ROOTS

SHM = "FLATPEAK_TEST_SHM"
"""Environment variable with the folder of the node, `$FLATPEAK_TEST_SHM` in a job."""


@dataclass(frozen=True)
class Nodes:
    cluster: Cluster
    folders: list[Path]
    handles: list[Any]

    @property
    def address(self) -> str:
        return self.cluster.address

    def of(self, pid: int) -> int:
        """The number of the node that a process is on."""
        settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (found,) = [setting for setting in settings if setting.startswith(f"{SHM}=".encode())]
        return [str(folder) for folder in self.folders].index(found.partition(b"=")[2].decode())

    def left(self) -> list[Path]:
        """What there is in the folders."""
        return [path for folder in self.folders for path in folder.iterdir()]

    def kill(self, number: int) -> None:
        """kill -9 of the node's raylet, with which all of its processes end."""
        self.cluster.remove_node(self.handles[number], allow_graceful=False)


@contextmanager
def ray_nodes(folder: Path, cores: Sequence[int]) -> Iterator[Nodes]:
    """Nodes with so many cores each; the first is the head, and the one where drivers start."""
    folders = [folder / f"node-{number}" for number in range(len(cores))]
    changed = {"PYTHONPATH": SOURCE_ROOTS, "OMP_NUM_THREADS": "1", SHM: str(folders[0])}
    before = {name: os.environ.get(name) for name in (*changed, "RAY_AUTH_MODE")}
    os.environ.update(changed)
    cluster = Cluster()
    handles: list[Any] = []
    try:
        for own, count in zip(folders, cores, strict=True):
            own.mkdir()
            os.environ[SHM] = str(own)
            handles.append(
                cluster.add_node(
                    num_cpus=count, object_store_memory=100 * 2**20, include_dashboard=False
                )
            )
        os.environ[SHM] = str(folders[0])
        yield Nodes(cluster, folders, handles)
    finally:
        cluster.shutdown()
        with warnings.catch_warnings():
            # Ray leaves a socket to the garbage collector, which would tell of it in another test.
            warnings.simplefilter("ignore", ResourceWarning)
            handles.clear()
            cluster.__dict__.clear()
            gc.collect()
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
