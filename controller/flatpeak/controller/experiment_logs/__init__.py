"""The curves of a run for those who compare many: TensorBoard, Weights & Biases.

A log has every figure of `steps.jsonl`, by the same names, and the resolved spec. The packages are
extras, imported where a job asks for them.
"""

from flatpeak.controller.experiment_logs.log import ExperimentLog, Writer, figures_of
from flatpeak.controller.experiment_logs.start import check_experiment_logs, experiment_logs

__all__ = [
    "ExperimentLog",
    "Writer",
    "check_experiment_logs",
    "experiment_logs",
    "figures_of",
]
