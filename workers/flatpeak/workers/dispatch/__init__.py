"""Expert dispatch: bounded, lossless and load-balanced. See README.md for how and why."""

from flatpeak.workers.dispatch.agreement import assumed_routing, make_routing
from flatpeak.workers.dispatch.assignment import DispatchPlan, plan_least_loaded
from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.dispatch.pipeline import moe_forward
from flatpeak.workers.dispatch.report import DispatchReport, worst_of
from flatpeak.workers.dispatch.routing import Routing

__all__ = [
    "DispatchOptions",
    "DispatchPlan",
    "DispatchReport",
    "Routing",
    "assumed_routing",
    "make_routing",
    "moe_forward",
    "plan_least_loaded",
    "worst_of",
]
