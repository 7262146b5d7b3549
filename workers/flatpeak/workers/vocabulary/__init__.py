"""Ring-DTP: the vocabulary projection and its cross entropy, sharded over a ring of ranks."""

from flatpeak.workers.vocabulary.loss import ring_cross_entropy, ring_log_probs

__all__ = ["ring_cross_entropy", "ring_log_probs"]
