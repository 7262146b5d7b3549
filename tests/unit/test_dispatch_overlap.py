"""What overlaps with what: the order in which a pass issues its work, and what makes it safe."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatpeak.workers.dispatch import DispatchOptions, moe_forward
from moe_families import PlainExperts, make_experts, make_tokens, profile, slice_of
from ranks import run_ranks

OPTIONS = DispatchOptions(tokens_per_chunk=5, min_chunk=1, balance_above=1.0, max_foreign_experts=3)
TOKENS, K = 25, 3
CHUNKS = TOKENS // 5


class _Watched:
    """The work of a collective, which tells when it is waited for."""

    def __init__(self, work: Any, waited: Callable[[], None]) -> None:
        self._work, self._waited = work, waited

    def wait(self) -> Any:
        self._waited()
        return self._work.wait()


@contextmanager
def exchanges_watched(
    issued: Callable[[torch.Tensor, torch.Tensor], Callable[[], None]],
) -> Iterator[None]:
    """Call `issued(landing, rows)` at every exchange of rows; what it returns, at the wait for it.

    Tables of sizes, which are exchanged before, are waited for on the spot."""
    plain = dist.all_to_all_single

    def watched(landing: torch.Tensor, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            return plain(landing, rows, *args, **kwargs)
        waited = issued(landing, rows)
        return _Watched(plain(landing, rows, *args, **kwargs), waited)

    dist.all_to_all_single = watched
    try:
        yield
    finally:
        dist.all_to_all_single = plain


def _ran(rank: int, backward: bool) -> list[str]:
    """What one pass issued, in order: `issue`, `wait` with the exchange's number, and `compute`."""
    module: PlainExperts = slice_of(make_experts("plain", 8), rank, 2)  # type: ignore[assignment]
    tokens = make_tokens(profile(TOKENS, 8, K, 60, 3), seed=rank).leaves()
    events: list[str] = []
    gate, exchanges = module._apply_gate, 0

    def logging_gate(up: torch.Tensor) -> torch.Tensor:
        if events[-1:] != ["compute"]:
            events.append("compute")
        return gate(up)

    def issued(landing: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        nonlocal exchanges
        number, exchanges = exchanges, exchanges + 1
        events.append(f"issue {number}")
        return lambda: events.append(f"wait {number}")

    module._apply_gate = logging_gate
    with exchanges_watched(issued):
        output = moe_forward(
            module,
            tokens.hidden,
            tokens.ids,
            tokens.weights,
            group=dist.group.WORLD,
            options=OPTIONS,
        )
        if backward:
            events.clear()
            exchanges = 0
            output.backward(tokens.upstream)
    return events


@dataclass
class _Flight:
    """Where in the log one chunk goes out, lands, is computed, returns and is home."""

    sent: int
    landed: int
    computed: int
    returned: int
    home: int


def flights(events: list[str], returns: int) -> list[_Flight]:
    """`returns`: exchanges that bring a chunk's results home."""
    # Rows 0, rows 1, results 0, rows 2, results 1, ..., results of the last.
    rows, results, number = [], [], 0
    for chunk in range(CHUNKS + 1):
        if chunk < CHUNKS:
            rows.append(number)
            number += 1
        if chunk:
            results.append(number)
            number += returns
    computed = [at for at, event in enumerate(events) if event == "compute"]
    assert len(computed) == CHUNKS
    return [
        _Flight(
            events.index(f"issue {row}"),
            events.index(f"wait {row}"),
            compute,
            events.index(f"issue {result}"),
            events.index(f"wait {result}"),
        )
        for row, result, compute in zip(rows, results, computed, strict=True)
    ]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_rows_go_out_and_results_come_home_while_experts_compute(backward: bool):
    for events in run_ranks(2, _ran, backward):
        chunks = flights(events, returns=2 if backward else 1)
        assert chunks[-1].home > chunks[-1].returned
        for before, here in zip([None, *chunks], chunks, strict=False):
            assert here.sent < here.landed < here.computed < here.returned < here.home
            if before is None:
                continue
            # The next rows are on their way before this chunk is computed, and so are the last
            # results, which are waited for only afterwards.
            assert here.sent < before.computed
            assert before.returned < here.computed < before.home


# What follows logs every operation with the lane it was issued to, and the marks between the lanes.
# Two accesses to the same bytes, one of them a write, must be in order by their lane or by a mark
# that was followed. Collectives have a lane of their own: they start after what was issued to the
# lane that issues them, and a wait for one orders the lane that waits.

COMPUTE, TRAVEL, NETWORK = "compute", "travel", "network"
Bytes = dict[int, np.ndarray]
"""By storage, whether each byte is touched."""


@dataclass(frozen=True)
class Step:
    lane: str
    name: str
    reads: Bytes
    writes: Bytes


@dataclass(frozen=True)
class Mark:
    lane: str


@dataclass(frozen=True)
class Follow:
    lane: str
    mark: int
    """Its place in the log."""
    by_lanes: bool
    """Whether dispatch asked for it, rather than a collective."""


@dataclass
class LoggedLanes:
    """Two lanes that run nothing apart, for `moe_forward`."""

    log: list[Step | Mark | Follow] = field(default_factory=list)
    lane: str = COMPUTE

    @contextmanager
    def travelling(self) -> Iterator[None]:
        with self.on(TRAVEL):
            yield

    def mark(self) -> int:
        self.log.append(Mark(self.lane))
        return len(self.log) - 1

    def follow(self, mark: int, *, by_lanes: bool = True) -> None:
        self.log.append(Follow(self.lane, mark, by_lanes))

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        outer, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = outer

    def collective(self, name: str, reads: Bytes, writes: Bytes) -> Callable[[], None]:
        """Log one that is issued to the current lane; the result orders what waits for it."""
        issued = self.mark()
        with self.on(NETWORK):
            self.follow(issued, by_lanes=False)
            self.log.append(Step(NETWORK, name, reads, writes))
            done = self.mark()
        return lambda: self.follow(done, by_lanes=False)


class OperationsLogged(TorchDispatchMode):
    """Logs what each operation reads and writes; and, as a write of the lane that made it, the end
    of a storage, for that lane may then use its memory again."""

    def __init__(self, lanes: LoggedLanes) -> None:
        super().__init__()
        self._lanes = lanes
        self._numbers: dict[int, int] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "aten":
            self._log(func, args, kwargs, tensors(result))
        return result

    def _log(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        written = [
            value
            for argument, value in [
                *zip(func._schema.arguments, args, strict=False),
                *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
            ]
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        given = tensors((args, kwargs))
        held = {tensor.untyped_storage()._cdata for tensor in given}
        made = [each for each in results if each.untyped_storage()._cdata not in held]
        if not (written or made):
            return  # a view touches nothing
        reads = [each for each in given if all(each is not other for other in written)]
        index = args[2] if func.overloadpacket._qualified_op_name in _BY_ROW else None
        for tensor in made:
            self._number(tensor, self._lanes.lane)
        step = Step(
            self._lanes.lane,
            str(func),
            self.touched(reads, args[0], index),
            self.touched([*written, *made], args[0] if index is not None else None, index),
        )
        self._lanes.log.append(step)

    def _number(self, tensor: torch.Tensor, maker: str | None = None) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._count += 1
            self._numbers[key] = self._count
            weakref.finalize(storage, self._freed, key, storage.nbytes(), maker)
        return self._numbers[key]

    def _freed(self, key: int, nbytes: int, maker: str | None) -> None:
        number = self._numbers.pop(key)
        if maker is not None:
            whole = {number: np.ones(nbytes, dtype=bool)}
            self._lanes.log.append(Step(maker, "free", {}, whole))

    def touched(
        self,
        values: Sequence[torch.Tensor],
        table: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> Bytes:
        """Of `table`, the rows in `index` alone."""
        found: Bytes = {}
        for tensor in values:
            storage = tensor.untyped_storage()
            mask = found.setdefault(self._number(tensor), np.zeros(storage.nbytes(), dtype=bool))
            places = positions_of(tensor)
            if index is not None and tensor is table:
                places = places[index.numpy()]
            for byte in range(tensor.itemsize):
                mask[places * tensor.itemsize + byte] = True
        return found


# (table, dim, index, ...)
_BY_ROW = {"aten::index_add_", "aten::index_copy_", "aten::index_select"}


def positions_of(tensor: torch.Tensor) -> np.ndarray:
    """The element of the storage that each entry is."""
    places = np.full(tensor.shape, tensor.storage_offset())
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.ndim
        shape[axis] = size
        places = places + (np.arange(size) * stride).reshape(shape)
    return places


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def races(log: Sequence[Step | Mark | Follow], *, without: int | None = None) -> set[str]:
    """Pairs of steps that touch the same bytes in no order; `without` the follow at that place."""
    known = {lane: dict.fromkeys((COMPUTE, TRAVEL, NETWORK), 0) for lane in _LANES}
    marks: dict[int, dict[str, int]] = {}
    earlier: list[tuple[Step, int]] = []
    found = set()
    for place, event in enumerate(log):
        own = known[event.lane]
        if isinstance(event, Mark):
            marks[place] = dict(own)
        elif isinstance(event, Follow):
            if place != without:
                for lane, steps in marks[event.mark].items():
                    own[lane] = max(own[lane], steps)
        else:
            found |= {
                f"{step.name} ({step.lane}), {event.name} ({event.lane})"
                for step, number in earlier
                if number >= own[step.lane] and conflict(step, event)
            }
            earlier.append((event, own[event.lane]))
            own[event.lane] += 1
    return found


_LANES = (COMPUTE, TRAVEL, NETWORK)


def conflict(one: Step, other: Step) -> bool:
    return any(
        (first[storage] & second[storage]).any()
        for first, second in (
            (one.writes, other.writes),
            (one.writes, other.reads),
            (one.reads, other.writes),
        )
        for storage in first.keys() & second.keys()
    )


def _logged(rank: int, dtype: torch.dtype) -> list[list[Step | Mark | Follow]]:
    """The log of a forward pass, and that of its backward pass."""
    module = slice_of(make_experts("plain", 8), rank, 2).to(dtype)
    tokens = make_tokens(profile(TOKENS, 8, K, 60, 3), seed=rank)
    hidden = tokens.hidden.to(dtype).requires_grad_()
    weights, upstream = tokens.weights.requires_grad_(), tokens.upstream.to(dtype)
    lanes = LoggedLanes()
    operations = OperationsLogged(lanes)

    def issued(landing: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        reads, writes = operations.touched([rows]), operations.touched([landing])
        return lanes.collective("all-to-all", reads, writes)

    with exchanges_watched(issued), operations:
        output = moe_forward(
            module,
            hidden,
            tokens.ids,
            weights,
            group=dist.group.WORLD,
            options=OPTIONS,
            lanes=lanes,
        )
        output.detach().clone()
        forward = list(lanes.log)
        lanes.log.clear()
        output.backward(upstream)
        for gradient in (hidden.grad, weights.grad):
            assert gradient is not None
            gradient.clone()
    return [forward, lanes.log]


def _races(rank: int, dtype: torch.dtype) -> list[tuple[set[str], list[bool], set[str]]]:
    """Of each pass: its races, whether leaving out each follow would make one, and the lanes that
    freed memory."""
    return [
        (
            races(log),
            [
                bool(races(log, without=place))
                for place, event in enumerate(log)
                if isinstance(event, Follow) and event.by_lanes
            ],
            {event.lane for event in log if isinstance(event, Step) and event.name == "free"},
        )
        for log in _logged(rank, dtype)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_lanes_race_nowhere_and_every_follow_is_needed(dtype: torch.dtype):
    for passes in run_ranks(2, _races, dtype):
        for found, needed, freed in passes:
            assert found == set()
            # The start, each chunk's arrival and return, the end.
            assert needed == [True] * (2 * CHUNKS + 2)
            assert freed == {COMPUTE, TRAVEL}
