"""What a folder can still take, by the mounts, the machine and the limits of a container."""

import shutil
from pathlib import Path

import pytest

from flatpeak.workers.host_memory import node_path, room

KIB, GIB = 2**10, 2**30


class Machine:
    """A proc and sys file system written by hand."""

    def __init__(self, root: Path, folder: Path, kind: str) -> None:
        self.root = root
        self.write(
            "proc/self/mountinfo",
            "24 1 0:1 / / rw shared:1 - ext4 /dev/vda rw\n"
            f"30 24 0:27 / {folder} rw - {kind} x rw\n",
        )
        self.write("proc/meminfo", f"MemTotal: {64 * GIB // KIB} kB\nMemAvailable: 48 kB\n")

    def write(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def available(self, nbytes: int) -> None:
        self.write("proc/meminfo", f"MemAvailable: {nbytes // KIB} kB\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path.resolve()


def test_memory_counts_for_a_folder_in_memory_alone(tmp_path: Path, folder: Path):
    free = shutil.disk_usage(folder).free
    disk = room(folder, root=Machine(tmp_path / "a", folder, "ext4").root)
    assert disk.where == str(folder)
    assert disk.nbytes == pytest.approx(free, rel=0.1)
    memory = room(folder, root=Machine(tmp_path / "b", folder, "tmpfs").root)
    assert (memory.nbytes, memory.where) == (48 * KIB, "the memory of this machine")


def test_a_folder_below_the_mount_counts_and_one_beside_it_does_not(tmp_path: Path, folder: Path):
    root = Machine(tmp_path / "a", folder, "tmpfs").root
    below, beside = folder / "deep", folder.with_name("shm2")
    for path in (below, beside):
        path.mkdir()
    assert room(below, root=root).nbytes == 48 * KIB
    assert room(beside, root=root).where == str(beside)


@pytest.mark.parametrize("inside", ["jobs/7", ""], ids=["own group", "container"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts_less_what_it_can_give_back(
    tmp_path: Path, folder: Path, version: int, inside: str
):
    machine = Machine(tmp_path / "a", folder, "tmpfs")
    machine.available(40 * KIB)
    controllers, names, prefix = [
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
        ("", ("memory.max", "memory.current"), ""),
    ][version - 1]
    machine.write("proc/self/cgroup", f"5:devices:/x\n4:{controllers}:/jobs/7\n")
    place = f"sys/fs/cgroup/{controllers}/{inside}"
    machine.write(f"{place}/{names[0]}", f"{30 * KIB}\n")
    machine.write(f"{place}/{names[1]}", f"{25 * KIB}\n")
    machine.write(f"{place}/memory.stat", f"anon 1\n{prefix}inactive_file {5 * KIB}\n")
    found = room(folder, root=machine.root)
    assert found.nbytes == 10 * KIB
    assert f"{names[0]} = 30,720" in found.where


def test_a_group_without_a_limit_or_above_it_leaves_the_rest_or_nothing(
    tmp_path: Path, folder: Path
):
    machine = Machine(tmp_path / "a", folder, "tmpfs")
    machine.write("proc/self/cgroup", "0::/jobs/7\n")
    machine.write("sys/fs/cgroup/jobs/7/memory.max", "max\n")
    machine.write("sys/fs/cgroup/jobs/7/memory.current", "5\n")
    assert room(folder, root=machine.root).nbytes == 48 * KIB
    machine.write("sys/fs/cgroup/jobs/memory.max", "4\n")
    machine.write("sys/fs/cgroup/jobs/memory.current", "5\n")
    assert room(folder, root=machine.root).nbytes == 0


def test_without_proc_and_sys_the_folder_alone_counts(tmp_path: Path, folder: Path):
    assert room(folder, root=tmp_path / "nothing").where == str(folder)


def test_this_machine_has_room():
    assert 0 < room(Path("/dev/shm")).nbytes <= shutil.disk_usage("/dev/shm").free


def test_a_path_of_the_job_is_that_of_the_node(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/7")
    monkeypatch.setenv("USER_ID", "u3")
    monkeypatch.setenv("HOME", "/home/me")
    assert node_path("$SCRATCH/${USER_ID}/a") == Path("/scratch/7/u3/a")
    assert node_path("~/b") == Path("/home/me/b")
    assert node_path("/dev/shm") == Path("/dev/shm")
