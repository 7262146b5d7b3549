"""The end of a run whose arenas nobody could take over: a snapshot of what is in them."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

from flatpeak.controller.lives import ArenaFile
from flatpeak.controller.old_arenas import OldArenas
from flatpeak.controller.placement import Placed, release
from flatpeak.controller.resume import parameter_sizes, snapshot_meta
from flatpeak.controller.runs import RunEvent, RunFolder, event
from flatpeak.controller.spec import Spec
from flatpeak.controller.takeover import update_under_way
from flatpeak.controller.waiting import collect
from flatpeak.workers.snapshot import commit_manifest, saved_steps, snapshot_folder


def rescue(
    spec: Spec, files: Sequence[ArenaFile], folder: RunFolder, interrupted: Callable[[], bool]
) -> RunEvent | None:
    """Finishes the update that was under way in the arenas `files` and writes a snapshot; None
    where there is one of that step already.

    By an actor on each node, which takes no core: there may be none free. Raises what kept it from
    being written, Interrupted among others.
    """

    def ask(actors: list[Placed], what: str, method: str, *args: Any) -> dict[str, Any]:
        refs = {actor.name: getattr(actor.handle, method).remote(*args) for actor in actors}
        timeout_s = spec.cluster.step_timeout_s
        return collect(refs, what=what, timeout_s=timeout_s, interrupted=interrupted)

    records = folder.steps()
    last, clip = records[-1] if records else None, spec.train.max_grad_norm
    old = OldArenas(spec, files, ask=ask)
    try:
        step, sources = old.open(lambda versions: update_under_way({*versions}, last, clip))
        if step <= max(saved_steps(folder.path), default=0):
            return None
        target = snapshot_folder(folder.path, step)
        try:
            answers = ask(old.actors, "writing the last snapshot", "snapshot", str(target), step)
            parts = [part for of_node in answers.values() for part in of_node]
            buckets = (ranges for held in sources.held for ranges in held.ranges)
            sizes = parameter_sizes(held for ranges in buckets for held in ranges)
            commit_manifest(target, step=step, parts=parts, meta=snapshot_meta(spec, sizes))
        except Exception:
            shutil.rmtree(target, ignore_errors=True)  # without its manifest it is of no use
            raise
        return event("snapshot", step=step, folder=str(target))
    finally:
        release(None, [actor.handle for actor in old.actors])
