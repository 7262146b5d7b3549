"""A run of Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path

from flatpeak.controller.spec import Spec

UPLOAD_S = 60.0
"""Longest wait at the end for what is still to be uploaded."""


class WeightsAndBiases:
    """One run there for each run folder, also when that is resumed.

    Figures have `step` as their axis, since the service refuses to go back in its own: steps that
    a resumed run does again are there twice.
    """

    def __init__(self, spec: Spec, folder: Path, first_step: int) -> None:
        import wandb

        section = spec.logging.wandb
        # Below its own folder, where nothing else writes.
        known = folder / "wandb" / "flatpeak-run-id"
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or spec.run,
            mode=section.mode,
            id=known.read_text().strip() if first_step > 1 and known.is_file() else None,
            resume="allow",
            dir=str(folder),
            config=spec.model_dump(mode="json"),
            # The terminal belongs to the display, the code is none of the service's business.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                finish_timeout=UPLOAD_S,
                finish_timeout_raises=True,
            ),
        )
        known.parent.mkdir(exist_ok=True)
        known.write_text(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
