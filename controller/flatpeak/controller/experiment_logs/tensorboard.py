"""Event files of TensorBoard, by torch's own writer."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import indent

from flatpeak.controller.runs import runs_folder
from flatpeak.controller.spec import Spec
from flatpeak.controller.spec_file import dump_spec

_FLUSH_EVERY_S = 10


class TensorBoard:
    """Writes into the run folder, or below `logging.tensorboard` under the run's name.

    A resumed run adds a file; TensorBoard then forgets what earlier files have from `first_step`
    on, which are steps that are done again.
    """

    def __init__(self, spec: Spec, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        chosen = spec.logging.tensorboard
        path = folder / "tensorboard" if chosen is True else runs_folder(str(chosen)) / spec.run
        self._writer = SummaryWriter(str(path), purge_step=first_step, flush_secs=_FLUSH_EVERY_S)
        self._writer.add_text("spec", indent(dump_spec(spec), "    "), first_step)  # as Markdown

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, figure in figures.items():
            self._writer.add_scalar(name, figure, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()
