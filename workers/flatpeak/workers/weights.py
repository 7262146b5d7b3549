"""Where the first fp32 masters come from: a checkpoint or the family's own random law."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatpeak.workers.buckets import Range
from flatpeak.workers.checkpoint import CheckpointReader, RandomInit, build_meta_model, load_config

if TYPE_CHECKING:
    from flatpeak.controller.spec import Spec


class RowSource(Protocol):
    def read(self, name: str, start: int, stop: int) -> Tensor: ...


class Weights:
    """Reads flat ranges of canonical parameters, whole rows at a time."""

    def __init__(self, source: RowSource, shapes: dict[str, torch.Size]) -> None:
        self._source, self._shapes = source, shapes

    def read(self, wanted: Range) -> Tensor:
        """fp32 elements [start, stop) of the flattened parameter `wanted.name`."""
        shape = self._shapes[wanted.name]
        row = max(1, shape.numel() // max(1, shape[0]))
        first, last = wanted.start // row, -(-wanted.stop // row)
        values = self._source.read(wanted.name, first, last).reshape(-1).float()
        return values[wanted.start - first * row : wanted.stop - first * row]


def open_weights(spec: "Spec", model: PreTrainedModel | None = None) -> Weights:
    """The initial weights of the job, checked against the model's shapes.

    `model` is the job's on the meta device, where somebody has made it already.
    """
    if model is None:
        model = build_meta_model(load_config(path=spec.model.path, config=spec.model.config))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if spec.model.path is None or spec.model.weights == "random":
        return Weights(RandomInit(model, spec.train.seed), shapes)
    return Weights(CheckpointReader(spec.model.path, model), shapes)
