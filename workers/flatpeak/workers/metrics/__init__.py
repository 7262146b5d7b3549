"""Prometheus metrics of a run's processes: names, values, and the HTTP server of each process.

Every process has a registry and a port of its own. A scrape reads and consumes nothing, so any
number of scrapers see the same.

The names are read by the dashboards too, so nothing here imports torch; `roles.py`, which does, is
imported by the processes that it is about.
"""

from flatpeak.workers.metrics.names import METRICS, Metric
from flatpeak.workers.metrics.process import ProcessMetrics
from flatpeak.workers.metrics.server import NODE, MetricsServer, Serving, is_token
from flatpeak.workers.metrics.windows import WindowPeak

__all__ = [
    "METRICS",
    "NODE",
    "Metric",
    "MetricsServer",
    "ProcessMetrics",
    "Serving",
    "WindowPeak",
    "is_token",
]
