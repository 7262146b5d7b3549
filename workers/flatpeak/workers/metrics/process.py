"""The metrics of one process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from flatpeak.workers.metrics.names import METRICS, PREFIX, PROCESS_LABELS, Role
from flatpeak.workers.metrics.windows import WindowPeak

# A second series beside each counter, of its time of birth, which nothing here needs.
disable_created_metrics()


class ProcessMetrics:
    """Values of the metrics of one role, in a registry of their own.

    A metric is exported from its first value on.
    """

    def __init__(self, *, run: str, role: Role, rank: int = 0, generation: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._role = role
        self._process = (run, role, str(rank), str(generation))
        self._families: dict[str, Counter | Gauge] = {}
        self._windows: dict[tuple[str, str], WindowPeak] = {}
        self._largest: dict[tuple[str, str], float] = {}

    @property
    def labels(self) -> dict[str, str]:
        return dict(zip(PROCESS_LABELS, self._process, strict=True))

    def set(self, name: str, value: float, *labels: str) -> None:
        self._gauge(name, *labels).set(value)

    def raise_to(self, name: str, value: float, key: str) -> None:
        """Export the largest of the values that were given for label `key`."""
        largest = max(value, self._largest.get((name, key), value))
        self._largest[name, key] = largest
        self.set(name, largest, key)

    def add(self, name: str, amount: float, *labels: str) -> None:
        counter = self._child(name, Counter, *labels)
        assert isinstance(counter, Counter)
        counter.inc(amount)

    def record(self, name: str, value: float, key: str, *, window_s: float) -> None:
        """Export the largest value of the window for label `key`."""
        window = self._windows.get((name, key))
        if window is None:
            window = self._windows[name, key] = WindowPeak(window_s)
            self._gauge(name, key).set_function(window.peak)
        window.record(value)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        gauge = self._child(name, Gauge, *labels)
        assert isinstance(gauge, Gauge)
        return gauge

    def _child(self, name: str, kind: type[Counter] | type[Gauge], *labels: str) -> Counter | Gauge:
        metric = METRICS[name]
        assert metric.role == self._role, f"{name} is a metric of the {metric.role}"
        assert metric.is_counter == (kind is Counter), f"{name} is no {kind.__name__.lower()}"
        if name not in self._families:
            names = (*PROCESS_LABELS, *metric.labels)
            self._families[name] = kind(PREFIX + name, metric.help, names, registry=self.registry)
        return self._families[name].labels(*self._process, *labels)
