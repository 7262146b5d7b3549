"""What a job may choose about expert dispatch. Fixed at launch, the same on every rank."""

from dataclasses import dataclass

from flatpeak.workers.errors import InputError

_LARGEST = 10**300


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    tokens_per_chunk: int | None = None
    """Most tokens of one rank that are on their way at once; None takes the layer as one chunk.
    Peak memory falls with it, time rises."""
    max_chunks: int = 64
    """At most this many chunks follow from `tokens_per_chunk`; the budget and `receive_rows` may
    ask for more."""
    budget_bytes: int | None = None
    """Device bytes that a pass may take above its inputs and results; the layer is cut into as many
    chunks as that asks for. None sets no bound."""
    receive_rows: int | None = None
    """Hard cap on the rows that one rank receives in one chunk; None sets none."""
    capacity_factor: float = 1.0
    """Routes a rank may be given, as a multiple of the mean. Lower is better balanced, and moves
    more expert weights."""
    min_chunk: int = 1024
    """Fewest routes worth the move of an expert's weights; at most an eighth of a rank's capacity
    counts. Pieces of load, not chunks of tokens."""
    balance_above: float = 1.3
    """Weights move only when the busiest rank has more than this multiple of the mean."""
    max_foreign_experts: int = 4
    """Experts of other ranks that one rank holds at once; 0 never moves weights."""

    def __post_init__(self) -> None:
        for name in ("max_chunks", "min_chunk"):
            self._check(name, int, 1)
        self._check("max_foreign_experts", int, 0)
        for name in ("capacity_factor", "balance_above"):
            self._check(name, float, 1.0)
            # So that ranks which were given 1 and 1.0 have equal options.
            object.__setattr__(self, name, float(getattr(self, name)))
        # Nothing smaller holds any token; whether one holds is known with the layer's sizes.
        for name in ("tokens_per_chunk", "budget_bytes", "receive_rows"):
            if getattr(self, name) is not None:
                self._check(name, int, 1)

    def _check(self, name: str, kind: type, smallest: float) -> None:
        value = getattr(self, name)
        fits = type(value) is int or (kind is float and type(value) is float)
        # Written so that NaN is refused too; what is larger is no float.
        if not (fits and _LARGEST >= value >= smallest):
            what = "an integer" if kind is int else "a number"
            raise InputError(
                f"dispatch {name} is {value!r}; it should be {what}, and the smallest legal value "
                f"is {smallest}"
            )
