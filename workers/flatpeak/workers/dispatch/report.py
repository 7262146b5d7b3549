"""What a step's dispatch did, in the figures that a run reports."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from flatpeak.workers.dispatch.routing import Routing


@dataclass(frozen=True, kw_only=True)
class DispatchReport:
    """Of every figure the highest of any layer, microbatch and rank that the report is on."""

    imbalance_before: float = 0.0
    """Routes of the busiest rank over the mean, if every expert stayed where it is."""
    imbalance_after: float = 0.0
    """The same as planned."""
    chunks: int = 0
    """Those that a layer was cut into."""
    foreign_experts: int = 0
    """Experts of other ranks that a rank held at once; `max_foreign_experts` is their cap."""
    received_rows: int = 0
    """Rows that a rank received in one chunk; `receive_rows` is their cap."""
    planned_bytes: int = 0
    """Above inputs and results of a layer, by its footprint; `budget_bytes` is their cap. 0 where
    none is set."""

    def including(self, routing: Routing) -> "DispatchReport":
        """This report with one more layer in it."""
        plan, chunks = routing.plan, routing.chunks
        return worst_of(
            [
                self,
                DispatchReport(
                    imbalance_before=imbalance(plan.native_loads),
                    imbalance_after=imbalance(plan.loads),
                    chunks=len(chunks),
                    foreign_experts=len(plan.foreign[routing.rank]),
                    received_rows=max(sum(chunk.receive) for chunk in chunks),
                    planned_bytes=routing.planned_bytes,
                ),
            ]
        )

    def figures(self) -> dict[str, float]:
        return asdict(self)


def worst_of(reports: Iterable[DispatchReport]) -> DispatchReport:
    reports = list(reports)
    names = [entry.name for entry in fields(DispatchReport)]
    return DispatchReport(**{name: max(getattr(r, name) for r in reports) for name in names})


def imbalance(loads: tuple[int, ...]) -> float:
    """The largest load over the mean; 1 where there is none."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
