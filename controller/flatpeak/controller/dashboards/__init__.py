"""Grafana dashboards of a run: generated from code, written as JSON or pushed.

`panels.py` has the building blocks, `boards.py` what is shown, `grafana.py` the server's API.
Neither needs torch or Ray.
"""

from flatpeak.controller.dashboards.boards import dashboards
from flatpeak.controller.dashboards.files import check_files, render_files, rendered

__all__ = ["check_files", "dashboards", "render_files", "rendered"]
