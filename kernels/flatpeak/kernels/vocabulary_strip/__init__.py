"""The strip of the vocabulary loss: logits of a token tile against a vocabulary tile, folded."""

from flatpeak.kernels.vocabulary_strip.reference import (
    accumulate_,
    merge_,
    strip_residual,
    strip_state,
)

__all__ = ["accumulate_", "merge_", "strip_residual", "strip_state"]
