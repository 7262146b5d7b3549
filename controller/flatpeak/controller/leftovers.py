"""Removing what killed processes of a run left in shared memory.

Of one launch alone: the arena of another run whose process is being restarted looks stale too.
"""

import time

from flatpeak.workers.arena import SUFFIX, remove_stale
from flatpeak.workers.host_memory import node_path

_PATIENCE_S = 10.0


def arena_name(run: str, token: str, index: int) -> str:
    """File name of an optimizer actor's arena; `token` tells the launches of a run apart."""
    return f"flatpeak-{run}-{token}-{index}{SUFFIX}"


def remove_arenas(folder: str, run: str, token: str) -> bool:
    """Removes the arenas of a launch whose processes were killed, and waits until they are gone.

    Returns whether none is left; the next run that starts here sweeps again.
    """
    pattern = f"flatpeak-{run}-{token}-*{SUFFIX}*"  # half-made ones have a longer name
    deadline = time.monotonic() + _PATIENCE_S
    while not all(remove_stale(path) for path in node_path(folder).glob(pattern)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
