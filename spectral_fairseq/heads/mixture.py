"""Mixture of softmaxes (MoS) and mixture of contexts (MoC) as output layers.

Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck: A High-Rank RNN Language Model",
ICLR 2018, sections 2.4 and 2.5, https://arxiv.org/abs/1711.03953. From features g of d_h
dimensions, with a table W of N words and d dimensions, which is usually that of the input
embedding:

    pi  = softmax(W_pi g)                       prior, K values, no bias
    h_k = dropout(s tanh(P_k g + c_k))          contexts, k = 1..K, each with its own dropout mask
    MoS:  P(v) = sum_k pi_k softmax(W h_k + b)_v
    MoC:  P(v) = softmax(W sum_k pi_k h_k + b)_v

The scale s is 1 in the paper, whose features come from an LSTM and are bounded by 1, as tanh is.
The features of a Transformer are larger, and with a larger s it learns much faster: see
``studies/mixtures.md``.

Flags: ``--mixture-components`` 15, ``--mixture-dropout`` 0, ``--mixture-context-scale`` 1.
In order: ``MixtureHead.log_prior``, ``MixtureHead.contexts``, ``MixtureHead.mixed_loss``.
"""

# No "from __future__ import annotations" here: TorchScript reads the attributes' types.
import logging
from typing import Any, ClassVar, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import Final

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.adversarial_softmax import adversarial_margin
from spectral_fairseq.functional.blocks import without_ignored
from spectral_fairseq.functional.dropout import locked_dropout
from spectral_fairseq.functional.mixture_loss import (
    SMALLEST_LINEAR,
    log_mixture,
    mixture_cross_entropy,
)
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.softcap import softcapped
from spectral_fairseq.functional.softmax_loss import Losses
from spectral_fairseq.heads.head import SOFTCAP, Head, HeadSpec
from spectral_fairseq.heads.softmax import softmax_loss
from spectral_fairseq.options import Option

logger = logging.getLogger(__name__)


class MixtureHead(Head):
    """Base class of the two mixtures: prior, contexts and table.

    Args:
        table: W, which look-ups may share.
        input_dim: d_h, width of the features.
        components: K, number of experts.
        dropout: probability with which an entry of a context is dropped; each expert has its own
            mask. The prior has no dropout.
        bias: give the scores a bias b, shape (N,), zero at the start.
        locked_dim: dimension of the features along which one dropout mask holds (the time axis of
            a recurrent network, 0 for features of shape (time, batch, d_h)); ``None`` draws a mask
            for every position.
        context_scale: s, greater than 0.
        softcap: c of a soft cap on the scores, of a mixture of contexts alone.

    Raises:
        ConfigurationError: K outside [1, N], a dropout outside [0, 1), or a scale or a cap that is
            not positive.
        UnsupportedError: a cap on the scores of several softmaxes.
    """

    options: ClassVar[Tuple[Option, ...]] = (
        Option(
            "mixture_components",
            15,
            "K: number of experts of a mixture output head",
            argument="components",
        ),
        Option(
            "mixture_dropout",
            0.0,
            "dropout of a mixture's contexts, with a mask for each expert",
            argument="dropout",
        ),
        Option(
            "mixture_context_scale",
            1.0,
            "s of a mixture's contexts s tanh(.); the paper's is 1, and a Transformer learns much "
            "faster with 4",
            argument="context_scale",
        ),
    )
    any_width = True

    own_loss = True
    adversarial = True

    components: Final[int]
    context_dim: Final[int]
    context_scale: Final[float]

    def __init__(
        self,
        table: Table,
        input_dim: int,
        components: int,
        dropout: float = 0.0,
        *,
        bias: bool = False,
        locked_dim: Optional[int] = None,
        context_scale: float = 1.0,
        softcap: Optional[float] = None,
    ) -> None:
        super().__init__(table, softcap)
        # The rank of the log-probabilities is at most N, so more than N experts give nothing.
        most = table.num_embeddings
        check_range("`components`", components, at_least=1, at_most=most, whole=True)
        check_range("`dropout`", dropout, at_least=0, below=1)
        check_range("`context_scale`", context_scale, above=0)
        self.components = components
        self.dropout = dropout
        self.locked_dim = locked_dim
        self.context_dim = table.embedding_dim
        self.context_scale = float(context_scale)
        self.prior = nn.Linear(input_dim, components, bias=False)
        self.latent = nn.Linear(input_dim, components * self.context_dim)
        start = nn.Parameter(torch.zeros(table.num_embeddings)) if bias else None
        self.register_parameter("bias", start)

    @classmethod
    def build(cls, table: Table, spec: HeadSpec, **options: Any) -> "MixtureHead":
        """A new head for features of any width."""
        return cls(table, spec.input_dim, bias=spec.bias, locked_dim=spec.locked_dim, **options)

    def log_prior(self, features: Tensor) -> Tensor:
        """log pi of ``features``, shape (*, d_h): shape (*, K), float32 at least."""
        logits = self.prior(features)
        if logits.dtype != torch.float64:
            logits = logits.float()
        return torch.log_softmax(logits, -1)

    def contexts(self, features: Tensor) -> Tensor:
        """h_k of ``features``, shape (*, d_h): shape (*, K, d)."""
        latent = torch.tanh(self.latent(features))  # [*, K d]
        if self.context_scale != 1.0:
            latent = latent * self.context_scale
        if self.locked_dim is None:
            latent = F.dropout(latent, self.dropout, self.training)
        else:
            latent = locked_dropout(latent, self.dropout, self.locked_dim, self.training)
        return latent.view(list(latent.shape[:-1]) + [self.components, self.context_dim])

    def checked_loss(self, features: Tensor, targets: Tensor, **options: Any) -> Losses:
        """Return the loss of a mixture, without tokens x N or tokens x K x N scores in memory."""
        if not self.normalised:
            options.pop("z_loss")
        if self.locked_dim is None:
            # Each position has a dropout mask of its own, so padding can be removed first.
            targets, features = without_ignored(
                options.pop("ignore_index"), targets.flatten(), features.flatten(0, -2)
            )
        contexts = self.contexts(features).flatten(0, -3)
        log_prior = self.log_prior(features).flatten(0, -2)
        return self.mixed_loss(contexts, log_prior, targets.flatten(), **options)

    def mixed_loss(
        self, contexts: Tensor, log_prior: Tensor, targets: Tensor, epsilon: float, **options: Any
    ) -> Losses:
        """The loss of contexts h_k, shape (T, K, d), with log pi, shape (T, K).

        Args:
            contexts: h_k.
            log_prior: log pi.
            targets: shape (T,).
            epsilon: of :meth:`Head.loss`.
            **options: likewise, for the function of tensors.
        """
        raise NotImplementedError

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Start a mixture from the checkpoint of a single softmax; fairseq calls this.

        The table is taken from the checkpoint. Prior and contexts, which it lacks, keep the values
        that they have in this head.
        """
        super().upgrade_state_dict_named(state_dict, name)
        own = {f"{name}.{key}": value for key, value in self.state_dict().items()}
        missing = [key for key in own if key.startswith((f"{name}.prior.", f"{name}.latent."))]
        if any(key in state_dict for key in missing):
            return
        if not any(key.startswith(f"{name}.table.") for key in state_dict):
            return
        state_dict.update({key: own[key] for key in missing})
        logger.warning(
            "%s: the checkpoint is not one of a mixture. Its table is taken; the mixture's prior "
            "and contexts start anew.",
            name,
        )

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the submodules."""
        cap = "" if self.softcap is None else f", softcap={self.softcap:g}"
        return (
            f"components={self.components}, dropout={self.dropout}, locked={self.locked_dim}, "
            f"context_scale={self.context_scale}{cap}"
        )


def mix_scores(scores: Tensor, log_prior: Tensor, smallest: float = SMALLEST_LINEAR) -> Tensor:
    """Return the log-mixture of the experts' scores, all of which are held at once.

    Args:
        scores: W h_k + b, shape (t, K, N).
        log_prior: log pi, shape (t, K).
        smallest: probability above which linear space is exact.

    Returns:
        Shape (t, N), in float32 (float64 for float64 input).
    """
    if scores.dtype != torch.float64:
        scores = scores.float()
    log_prior = log_prior.to(scores.dtype)
    probabilities = torch.softmax(scores, -1)
    mixture = torch.bmm(log_prior.exp().unsqueeze(1), probabilities).squeeze(1)  # [t, N]
    # Note [Linear space where it is exact] in functional/mixture_loss.py says why. The bound is a
    # default because TorchScript does not see the module's constants.
    if mixture.numel() == 0 or float(mixture.amin()) > smallest:
        return mixture.log()
    joint = torch.log_softmax(scores, -1) + log_prior.unsqueeze(-1)
    return torch.logsumexp(joint, 1)


def log_mixture_scripted(
    contexts: Tensor, log_prior: Tensor, matrix: Tensor, bias: Optional[Tensor] = None
) -> Tensor:
    """Return ``log_mixture``, computed by operations that TorchScript can compile.

    It is meant for generation, where a step has few tokens: all their scores are held at once.
    """
    flat_contexts = contexts.reshape(-1, contexts.size(-2), contexts.size(-1))  # [T, K, d]
    flat_log_prior = log_prior.reshape(-1, log_prior.size(-1))  # [T, K]
    mixed = mix_scores(F.linear(flat_contexts, matrix, bias), flat_log_prior)
    return mixed.view(list(contexts.shape[:-2]) + [matrix.size(0)])


class MixtureOfSoftmaxes(MixtureHead):
    """MoS: mixes the distributions of the experts, so that log P is not bound to rank d."""

    kind = "mos"
    summary = "a mixture of softmaxes"

    def forward(self, features: Tensor) -> Tensor:
        """The log-mixture of ``features``, shape (*, d_h): shape (*, N), float32.

        It is normalised: log_softmax leaves it as it is.
        """
        contexts, matrix = self.table.operands(self.contexts(features))  # [*, K, d], [N, d]
        log_prior = self.log_prior(features)  # [*, K]
        if torch.jit.is_scripting():
            return log_mixture_scripted(contexts, log_prior, matrix, self.bias)
        return log_mixture(contexts, log_prior, matrix, self.bias)

    def mixed_loss(
        self, contexts: Tensor, log_prior: Tensor, targets: Tensor, epsilon: float, **options: Any
    ) -> Losses:
        """Cross entropy of the log-mixture; see :meth:`MixtureHead.mixed_loss`.

        The target loses a margin of its own in each expert.
        """
        margin = None
        if epsilon:
            # What is ignored need not be a word of the table.
            ignored = options.pop("ignore_index", None)
            targets, contexts, log_prior = without_ignored(ignored, targets, contexts, log_prior)
            index = targets.unsqueeze(1)  # [T, 1]
            norms = row_norms(self.table.vectors(index))
            margin = adversarial_margin(contexts, norms, epsilon)
        rows, matrix = self.table.operands(contexts)
        return mixture_cross_entropy(
            rows, log_prior, targets, matrix, self.bias, margin=margin, **options
        )


def mixture_of_contexts(contexts: Tensor, log_prior: Tensor) -> Tensor:
    """Return sum_k pi_k h_k, equation 2 of the paper.

    Args:
        contexts: h, shape (*, K, d).
        log_prior: log pi, shape (*, K).

    Returns:
        Shape (*, d), in the dtype of ``contexts``.
    """
    prior = log_prior.exp().to(contexts.dtype).unsqueeze(-2)  # [*, 1, K]
    return torch.matmul(prior, contexts).squeeze(-2)


class MixtureOfContexts(MixtureHead):
    """MoC: mixes the contexts before one softmax; the paper's low-rank baseline."""

    kind = "moc"
    summary = "a mixture of contexts"
    options = (*MixtureHead.options, SOFTCAP)
    normalised = True

    def forward(self, features: Tensor) -> Tensor:
        """log P of ``features``, shape (*, d_h): shape (*, N), float32."""
        mixed = mixture_of_contexts(self.contexts(features), self.log_prior(features))  # [*, d]
        scores = self.table.project(mixed, self.bias)
        softcap = self.softcap
        if softcap is not None:
            scores = softcapped(scores, softcap)
        if scores.dtype != torch.float64:
            scores = scores.float()
        return torch.log_softmax(scores, -1)

    def mixed_loss(
        self, contexts: Tensor, log_prior: Tensor, targets: Tensor, epsilon: float, **options: Any
    ) -> Losses:
        """Cross entropy of one softmax; see :meth:`MixtureHead.mixed_loss`."""
        mixed = mixture_of_contexts(contexts, log_prior)  # [T, d]
        return softmax_loss(self, mixed, targets, epsilon, **options)
