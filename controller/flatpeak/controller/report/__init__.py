"""The report of a run: one HTML file that needs nothing else, read from the run folder alone."""

from flatpeak.controller.report.page import write_report

__all__ = ["write_report"]
