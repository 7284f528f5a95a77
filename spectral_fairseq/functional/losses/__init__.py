"""Softmax losses, computed block by block without tokens x words scores."""

from spectral_fairseq.functional.losses.adaptive_softmax import (
    adaptive_cross_entropy,
    adaptive_log_probabilities,
    check_cutoffs,
)
from spectral_fairseq.functional.losses.adversarial import (
    adversarial_logits,
    adversarial_margin,
    unperturbed_nll,
)
from spectral_fairseq.functional.losses.blockwise import blockwise_cross_entropy, smoothing_weights
from spectral_fairseq.functional.losses.consistency import (
    consistency_cross_entropy,
    dense_consistency,
)
from spectral_fairseq.functional.losses.mixture import (
    log_mixture,
    log_mixture_scripted,
    mixture_cross_entropy,
    mixture_of_contexts,
    posterior,
)
from spectral_fairseq.functional.losses.sigsoftmax import (
    sigsoftmax_cross_entropy,
    sigsoftmax_scores,
)

__all__ = [
    "adaptive_cross_entropy",
    "adaptive_log_probabilities",
    "adversarial_logits",
    "adversarial_margin",
    "blockwise_cross_entropy",
    "check_cutoffs",
    "consistency_cross_entropy",
    "dense_consistency",
    "log_mixture",
    "log_mixture_scripted",
    "mixture_cross_entropy",
    "mixture_of_contexts",
    "posterior",
    "sigsoftmax_cross_entropy",
    "sigsoftmax_scores",
    "smoothing_weights",
    "unperturbed_nll",
]
