"""The mark that tells an operator it runs inside a checkpoint's recomputation."""

import threading
from contextlib import AbstractContextManager, nullcontext


class _Mark(threading.local):
    depth = 0


_mark = _Mark()


class recomputation(AbstractContextManager[None]):
    # A checkpoint enters one such object again for each backward pass of a graph that is kept; a
    # generator could be entered once.
    def __enter__(self) -> None:
        _mark.depth += 1

    def __exit__(self, *exc: object) -> None:
        _mark.depth -= 1


def is_recomputing() -> bool:
    # Per thread: autograd recomputes on the thread that runs the backward pass.
    return _mark.depth > 0


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`: marks the second run of a layer."""
    return nullcontext(), recomputation()
