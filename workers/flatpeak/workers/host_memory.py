"""How many bytes a folder can still take: those that it has free, and those of memory behind it.

A file of a tmpfs is memory: it counts against the machine, and against the memory limit of the
container or batch job, which kills who exceeds it instead of refusing a write.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flatpeak.workers.errors import InputError

_IN_MEMORY = ("tmpfs", "ramfs")
# Per version of cgroups: limit, usage, and the entry of memory.stat that can be given back at once.
_CGROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def node_path(text: str) -> Path:
    """A path of the job with `~` and `$NAME` as they are on this node."""
    return Path(os.path.expanduser(os.path.expandvars(text)))


@dataclass(frozen=True, order=True)
class Room:
    nbytes: int
    where: str
    """What has no more than that, to be followed by "has ... free"."""


def room(folder: Path, *, root: Path = Path("/")) -> Room:
    """The least that any limit leaves to new files of `folder`.

    `root` has the proc and sys file systems to read, of which any part may be missing. Raises
    `InputError` when there is no such folder.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder} for arenas; set cluster.shm_dir")
    rooms = [Room(shutil.disk_usage(folder).free, str(folder))]
    if _file_system(folder.resolve(), root) in _IN_MEMORY:
        rooms += [*_of_machine(root), *_of_cgroups(root)]
    return min(rooms)


@dataclass(frozen=True)
class HostMemory:
    """Of a process, shared memory that it has touched included."""

    in_use_bytes: int = 0
    peak_bytes: int = 0


def host_memory() -> HostMemory:
    """Of this process."""
    status = dict(line.split(":", 1) for line in _lines(Path("/proc/self/status")))
    in_use, peak = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return HostMemory(in_use, peak)


def _file_system(folder: Path, root: Path) -> str | None:
    """The kind of the mount that `folder` lies in."""
    found: dict[Path, str] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        # The fields before the dash vary in number; later mounts hide earlier ones.
        before, _, after = line.partition(" - ")
        found[Path(before.split()[4])] = after.split()[0]
    return next((found[path] for path in (folder, *folder.parents) if path in found), None)


def _of_machine(root: Path) -> Iterator[Room]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield Room(1024 * int(value.split()[0]), "the memory of this machine")


def _of_cgroups(root: Path) -> Iterator[Room]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in _CGROUPS:
            continue
        mount = root / "sys/fs/cgroup" / controllers
        # A container may see itself at the root, and the path that its host has for it besides.
        inner = mount / path.lstrip("/")
        for group in (inner, *inner.parents):
            if group.is_relative_to(mount):
                yield from _of_cgroup(group, *_CGROUPS[controllers])


def _of_cgroup(group: Path, limit: str, usage: str, reclaimable: str) -> Iterator[Room]:
    most, used = (next(_lines(group / name), "max") for name in (limit, usage))
    if "max" not in (most, used):
        stat = dict(line.split() for line in _lines(group / "memory.stat"))
        held = int(used) - int(stat.get(reclaimable, 0))
        yield Room(max(0, int(most) - held), f"the memory limit {group / limit} = {int(most):,}")


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        yield from path.read_text().splitlines()
