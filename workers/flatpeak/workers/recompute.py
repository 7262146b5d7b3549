"""The mark that tells an operator it runs inside a checkpoint's recomputation."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class _Mark(threading.local):
    depth = 0


_mark = _Mark()


@contextmanager
def recomputation() -> Iterator[None]:
    _mark.depth += 1
    try:
        yield
    finally:
        _mark.depth -= 1


def is_recomputing() -> bool:
    # Per thread: autograd recomputes on the thread that runs the backward pass.
    return _mark.depth > 0


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`: marks the second run of a layer."""
    return nullcontext(), recomputation()
