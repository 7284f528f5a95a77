"""Softmax losses, computed block by block without tokens x words scores."""

from spectral_fairseq.functional.losses.adaptive_softmax import (
    adaptive_cross_entropy,
    adaptive_log_probabilities,
    check_cutoffs,
)
from spectral_fairseq.functional.losses.adversarial import (
    AdversarialLoss,
    adversarial_logits,
    adversarial_margin,
    unperturbed_loss,
    unperturbed_nll,
)
from spectral_fairseq.functional.losses.blockwise import (
    adversarial_blockwise_cross_entropy,
    blockwise_cross_entropy,
    smoothing_weights,
)
from spectral_fairseq.functional.losses.consistency import (
    consistency_cross_entropy,
    dense_consistency,
)
from spectral_fairseq.functional.losses.mixture import (
    adversarial_mixture_cross_entropy,
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
    "AdversarialLoss",
    "adaptive_cross_entropy",
    "adaptive_log_probabilities",
    "adversarial_blockwise_cross_entropy",
    "adversarial_logits",
    "adversarial_margin",
    "adversarial_mixture_cross_entropy",
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
    "unperturbed_loss",
    "unperturbed_nll",
]
