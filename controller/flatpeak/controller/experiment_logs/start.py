"""The experiment logs that a job asks for, and whether they can be had here."""

from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

from flatpeak.controller.experiment_logs.log import ExperimentLog
from flatpeak.controller.experiment_logs.tensorboard import TensorBoard
from flatpeak.controller.experiment_logs.weights_and_biases import UPLOAD_S, WeightsAndBiases
from flatpeak.controller.spec import LoggingSpec, Spec
from flatpeak.workers.errors import InputError

_FLUSH_S = 10.0


def check_experiment_logs(logging: LoggingSpec) -> None:
    """Raises InputError when a package or credentials are missing."""
    if logging.tensorboard is not False:
        _imported("torch.utils.tensorboard", setting="logging.tensorboard", extra="tensorboard")
    if logging.wandb.project is None:
        return
    wandb = _imported("wandb", setting="logging.wandb.project", extra="wandb")
    # Asked now: later it would prompt for a key in the middle of a run.
    if logging.wandb.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise InputError(
            f"logging.wandb.project = {logging.wandb.project} is to be written online, and there "
            "are no credentials for Weights & Biases: set WANDB_API_KEY, run `wandb login`, or "
            "set logging.wandb.mode to offline (WANDB_MODE, where set, must agree)"
        )


def experiment_logs(spec: Spec, folder: Path) -> list[ExperimentLog]:
    """The logs of a resolved `spec` whose run folder is `folder`."""
    logs = []
    if spec.logging.tensorboard is not False:
        open_writer = partial(TensorBoard, spec, folder)
        logs.append(ExperimentLog("TensorBoard", open_writer, last_words_s=_FLUSH_S))
    if spec.logging.wandb.project is not None:
        open_writer = partial(WeightsAndBiases, spec, folder)
        last_words_s = UPLOAD_S + _FLUSH_S
        logs.append(ExperimentLog("Weights & Biases", open_writer, last_words_s=last_words_s))
    return logs


def _imported(module: str, *, setting: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(
            f"{setting} needs a package that cannot be imported here: {error}; "
            f"pip install 'flatpeak[{extra}]' brings it, or leave the setting out"
        ) from None
