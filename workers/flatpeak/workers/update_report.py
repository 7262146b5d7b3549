"""What an optimizer actor says of an update when it answers."""

from dataclasses import dataclass, field

from flatpeak.workers.host_memory import HostMemory, host_memory
from flatpeak.workers.optimizer import Counters


@dataclass(frozen=True)
class UpdateReport:
    """`parameters` were updated in `seconds`: 0 in a skipped step, or where all was done before."""

    parameters: int = 0
    seconds: float = 0.0
    host: HostMemory = field(default_factory=HostMemory)


class UpdateReports:
    """Of one process, from what its counters have counted since the report before."""

    def __init__(self) -> None:
        self._parameters, self._seconds = 0, 0.0

    def next(self, counters: Counters) -> UpdateReport:
        parameters = counters.updated_parameters - self._parameters
        seconds = counters.update_s - self._seconds
        self._parameters, self._seconds = counters.updated_parameters, counters.update_s
        return UpdateReport(parameters, seconds, host_memory())
