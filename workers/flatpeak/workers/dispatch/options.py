"""What a job may choose about expert dispatch. Fixed at launch, the same on every rank."""

from dataclasses import dataclass

from flatpeak.workers.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    tokens_per_chunk: int | None = None
    """Tokens of one rank that are on their way at once; None takes the whole layer as one chunk.
    Peak memory falls with it, time rises."""
    max_chunks: int = 64
    """At most this many chunks follow from `tokens_per_chunk`; the budget and `receive_rows` may
    ask for more."""
    budget_bytes: int | None = None
    """Device bytes that dispatch may take above its inputs and results; the layer is cut into as
    many chunks as that asks for. None sets no bound."""
    receive_rows: int | None = None
    """Hard cap on the rows that one rank receives in one chunk; None sets none."""
    capacity_factor: float = 1.0
    """Routes a rank may be given, as a multiple of the mean. Lower is better balanced, and moves
    more expert weights."""
    min_chunk: int = 1024
    """Fewest routes worth the move of an expert's weights."""
    balance_above: float = 1.3
    """Weights move only when the busiest rank has more than this multiple of the mean."""
    max_foreign_experts: int = 4
    """Experts of other ranks that one rank holds at once; 0 never moves weights."""

    def __post_init__(self) -> None:
        self._at_least("max_chunks", 1)
        self._at_least("capacity_factor", 1.0)
        self._at_least("min_chunk", 1)
        self._at_least("balance_above", 1.0)
        self._at_least("max_foreign_experts", 0)
        if self.tokens_per_chunk is not None:
            self._at_least("tokens_per_chunk", 1)
        if self.budget_bytes is not None:
            self._at_least("budget_bytes", 1)
        if self.receive_rows is not None:
            # A token takes one row a destination, however many of its experts live there.
            self._at_least("receive_rows", 1)

    def _at_least(self, name: str, smallest: float) -> None:
        value = getattr(self, name)
        if not value >= smallest:
            raise InputError(f"dispatch {name} is {value}; the smallest legal value is {smallest}")
