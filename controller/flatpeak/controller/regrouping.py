"""Changing the number of workers while a run goes on, up to the boundary where it happens.

Other workers mean other shards, and these other buckets; other optimizer actors, where they may be
anywhere, mean arenas on other nodes. So the state is cut anew: the controller ends after a step,
the next one starts the processes that are wanted, and moves the state from the old arenas into new
ones, in memory. The old ones are kept until that is done; if it cannot be, the run goes on with
them.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from flatpeak.controller.spec import ClusterSpec, Spec

LEAVING, REGROUPED, OPTIMIZERS_MOVED = "workers_leaving", "workers_scaled", "optimizers_moved"


@dataclass(frozen=True)
class Regroup:
    """A request for the processes of `spec`, which has its degrees resolved."""

    request: str
    spec: Spec


def refusal(
    wanted: ClusterSpec, present: ClusterSpec, *, free: Mapping[str, float], device: str
) -> str | None:
    """Why the processes of `wanted` cannot take the place of those of `present`, which run beside
    what is `free` in the cluster, by resource; None where they can."""
    needed, held = _resources(wanted, device), _resources(present, device)
    short = {
        name: amount - held[name] - free.get(name, 0.0)
        for name, amount in needed.items()
        if amount > held[name] + free.get(name, 0.0)
    }
    if not short:
        return None
    has = ", ".join(f"{free.get(name, 0.0):g} {name}s" for name in needed)
    what = f"{wanted.workers} workers instead of {present.workers}"
    if wanted.workers == present.workers:
        what = f"{wanted.optimizers} optimizer actors instead of {present.optimizers}"
    return (
        f"{what} need "
        + " and ".join(f"{amount:g} {name}s" for name, amount in short.items())
        + f" more than there are; free in the cluster: {has}. Add nodes, wait for other jobs to "
        "end, or ask for fewer"
    )


def too_little_room(needed: Mapping[str, int], rooms: Mapping[str, int]) -> str | None:
    """Why the nodes with so many bytes free cannot hold the `needed` bytes of new arenas beside the
    old ones; None where they can."""
    for node, nbytes in sorted(needed.items()):
        if nbytes > rooms.get(node, nbytes):
            return (
                f"while the state moves, the new arenas need about {nbytes:,} bytes beside the old "
                f"ones on node {node}, which has {rooms[node]:,} free; stop the run and resume it "
                "with other processes, which goes by a snapshot"
            )
    return None


def _resources(cluster: ClusterSpec, device: str) -> dict[str, float]:
    cpus = (
        cluster.workers * cluster.cpus_per_worker + cluster.optimizers * cluster.cpus_per_optimizer
    )
    return {"CPU": float(cpus)} | ({"GPU": float(cluster.workers)} if device == "cuda" else {})


class Regrouping:
    """The one request under way: `ask` in any thread, `due` in the one that trains."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: Regroup | None = None

    def ask(self, regroup: Regroup) -> str | None:
        """Notes it; the reason where that is refused."""
        with self._lock:
            if self._asked is not None:
                cluster = self._asked.spec.cluster
                return (
                    f"a change to {cluster.workers} workers and {cluster.optimizers} optimizer "
                    "actors is under way; wait"
                )
            self._asked = regroup
            return None

    def due(self) -> Regroup | None:
        return self._asked
