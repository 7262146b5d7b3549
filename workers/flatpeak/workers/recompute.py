"""The mark that tells an operator it runs inside a checkpoint's recomputation, and a memory for
what its first run decided."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Decision = TypeVar("Decision")


class _Decisions:
    """What the first run of one checkpointed call decided, in order, for its recomputations."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._replayed = 0

    def rewind(self) -> None:
        self._replayed = 0

    def replay(self) -> Any:
        self._replayed += 1
        return self.made[self._replayed - 1]


class _Run(threading.local):
    """The innermost checkpointed calls that run on this thread."""

    def __init__(self) -> None:
        self.first: list[_Decisions] = []
        self.again: list[_Decisions] = []


_run = _Run()


class _FirstRun(AbstractContextManager[None]):
    def __init__(self, decisions: _Decisions) -> None:
        self._decisions = decisions

    def __enter__(self) -> None:
        _run.first.append(self._decisions)

    def __exit__(self, *exc: object) -> None:
        _run.first.pop()


class _Recomputation(AbstractContextManager[None]):
    # A checkpoint enters one such object again for each backward pass of a graph that is kept; a
    # generator could be entered once.
    def __init__(self, decisions: _Decisions) -> None:
        self._decisions = decisions

    def __enter__(self) -> None:
        self._decisions.rewind()
        _run.again.append(self._decisions)

    def __exit__(self, *exc: object) -> None:
        _run.again.pop()


def is_recomputing() -> bool:
    # Per thread: autograd recomputes on the thread that runs the backward pass.
    return bool(_run.again)


def is_checkpointed() -> bool:
    """Whether a checkpointed call runs, for the first time or again."""
    return bool(_run.first or _run.again)


def decide_once(decide: Callable[[], Decision]) -> Decision:
    """`decide()`; but inside a recomputation what the first run decided at this point.

    So a recomputation cannot differ in a decision that ranks took together, and need not take it
    again. Calls come in the same order in both runs.
    """
    made = _run.again[-1].replay() if _run.again else decide()
    # Of all open ones: a checkpoint within a checkpoint belongs to both.
    for decisions in _run.first:
        decisions.made.append(made)
    return made


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`: marks the second run of a layer."""
    decisions = _Decisions()
    return _FirstRun(decisions), _Recomputation(decisions)
