"""Data: files to tokens to samples that a global index addresses. Needs no torch.

sources (files) -> documents (Arrow batches) -> tokenizer (ids) -> corpus (one flat array in a cache
file) -> samples (windows with targets, positions and document boundaries), in the order that
`order` defines.
"""

from flatpeak.workers.data.order import sample_ids, share_of
from flatpeak.workers.data.samples import NO_TARGET, Sample, Samples, open_samples

__all__ = ["NO_TARGET", "Sample", "Samples", "open_samples", "sample_ids", "share_of"]
