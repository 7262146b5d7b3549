"""Removing what killed processes of a run left in shared memory.

Of one launch alone: the arena of another run whose process is being restarted looks stale too.
"""

import fcntl
import time
from contextlib import AbstractContextManager, ExitStack, suppress

from flatpeak.workers.arena import SUFFIX, remove_stale
from flatpeak.workers.host_memory import node_path

_PATIENCE_S = 10.0


def arena_name(run: str, token: str, index: int) -> str:
    """File name of an optimizer actor's arena; `token` tells the launches of a run apart."""
    return f"flatpeak-{run}-{token}-{index}{SUFFIX}"


def mirror_name(name: str) -> str:
    """File name of the mirror of the arena `name`: a name of its own, as nodes may share memory."""
    return name.removesuffix(SUFFIX) + "-mirror" + SUFFIX


class HeldArenas(AbstractContextManager["HeldArenas"]):
    """Inside, the arenas of a run on this node are held as by a process that maps them.

    So no other run takes them for a dead one's while all their processes are being replaced. Their
    names can go meanwhile, but their memory goes only at the end.
    """

    def __init__(self, folder: str, run: str) -> None:
        self._folder, self._run = folder, run
        self._files = ExitStack()
        self._token: str | None = None

    def hold(self, token: str | None) -> None:
        """Those with this token in their names, and no others."""
        if self._token == token:
            return
        self._files.close()
        self._token = token
        for path in node_path(self._folder).glob(f"flatpeak-{self._run}-{token}-*{SUFFIX}"):
            with suppress(FileNotFoundError):
                fcntl.flock(self._files.enter_context(path.open("rb")), fcntl.LOCK_SH)

    def __exit__(self, *error: object) -> None:
        self._files.close()


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
