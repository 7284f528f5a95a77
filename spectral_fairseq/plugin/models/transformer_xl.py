"""``--arch transformer_xl_wt103`` and ``transformer_xl_wt103_small``: Transformer-XL.

Dai et al., ACL 2019, with the sizes of its WikiText-103 base model; the small one of Wang et al.,
ICLR 2020, has 4 layers instead of 16. Learning rates, batches and segment lengths belong to the
recipe: see examples/lm_wikitext103.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import logging
import math
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.models import FairseqLanguageModel, register_model
from torch import Tensor, nn

from spectral_fairseq.embeddings import PlainEmbedding
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.heads import AdaptiveSoftmaxHead
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.transformer_xl import TransformerXL
from spectral_fairseq.plugin.criterions.penalised import PenalisedCrossEntropy
from spectral_fairseq.plugin.models.flat_config import to_namespace
from spectral_fairseq.plugin.models.options import (
    SpectralOptions,
    refuse_unsupported,
    with_defaults,
)
from spectral_fairseq.plugin.models.stateful_decoder import StatefulDecoder
from spectral_fairseq.plugin.models.tables import build_head, build_table

logger = logging.getLogger(__name__)

INIT_STD = 0.02  # of the published model, all weights

PUBLISHED_CUTOFFS = "20000,40000,200000"


@dataclass
class TransformerXLConfig(SpectralOptions):
    """Sizes, dropouts and memory of a Transformer-XL; defaults as for WikiText-103."""

    decoder_embed_dim: int = field(
        default=410, metadata={"help": "d, width of the table and of every layer"}
    )
    decoder_layers: int = field(default=16, metadata={"help": "number of layers"})
    decoder_attention_heads: int = field(default=10, metadata={"help": "number of heads"})
    decoder_head_dim: Optional[int] = field(
        default=None, metadata={"help": "width of a head; d / heads if unset"}
    )
    decoder_ffn_embed_dim: int = field(
        default=2100, metadata={"help": "width of the feed-forward parts"}
    )
    dropout: float = field(
        default=0.1, metadata={"help": "of embeddings, positions, layers and the output"}
    )
    attention_dropout: float = field(default=0.0, metadata={"help": "of attention probabilities"})
    mem_len: int = field(
        default=150, metadata={"help": "positions before a segment that are remembered"}
    )
    clamp_len: int = field(
        default=0, metadata={"help": "encode greater distances as this one; 0 for no limit"}
    )
    same_length: bool = field(
        default=False,
        metadata={"help": "let every position see exactly --mem-len positions, itself included"},
    )
    adaptive_softmax_cutoff: Optional[str] = field(
        default=None,
        metadata={
            "help": "first word of each cluster of the adaptive softmax, comma separated; "
            f"{PUBLISHED_CUTOFFS} with --output-head softmax if unset, '' for a full softmax"
        },
    )


class TransformerXLDecoder(StatefulDecoder):
    """The network and its output layer, fed segment by segment or token by token.

    Args:
        dictionary: of words.
        network: look-up, layers and memory.
        head: output layer.
    """

    def forward(
        self,
        prev_output_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        encoder_out: Any = None,
        incremental_state: Any = None,
        carry: Optional[Carry] = None,
        features_only: bool = False,
        **_: Any,
    ) -> Tuple[Tensor, Dict[str, Any]]:
        """Scores of the next word after each token.

        Args:
            prev_output_tokens: shape (B, T); padding only at the right end of a row.
            src_lengths: not needed.
            encoder_out: of no encoder; the host's generators pass it.
            incremental_state: of the host's generators; with it only the tokens that it does not
                hold yet are read, and none is forgotten.
            carry: memory of the streams of which the rows are segments.
            features_only: give the head's input instead of scores.

        Returns:
            Scores, shape (B, T, N): log-probabilities of an adaptive softmax or a mixture, logits
            of a full softmax; and a dictionary with ``features``, the last layer's outputs before
            dropout, shape (B, T, d).

        Raises:
            ConfigurationError: a carry of another number of streams.
        """
        if incremental_state is not None:
            features = raw = self._step(prev_output_tokens, incremental_state)
        else:
            state = None if carry is None else carry.state
            features, raw, after = self.network(prev_output_tokens, state)
            if carry is not None:
                carry.state = after
        extra = {"features": raw, "attn": None}  # the host's search looks for attn
        return (features if features_only else self.output_layer(features)), extra

    def _step(self, tokens: Tensor, incremental_state: Any) -> Tensor:
        cache = self._cached(incremental_state)
        known = 0 if cache is None else cache[0][0].size(2)
        features, cache = self.network.step(tokens[:, known:], cache)
        self._cache(incremental_state, cache)
        return features


# The flag of each argument of the network, for its error messages.
NETWORK_FLAGS = {
    "layers": "--decoder-layers",
    "heads": "--decoder-attention-heads",
    "head_dim": "--decoder-head-dim",
    "ffn_dim": "--decoder-ffn-embed-dim",
    "dropout": "--dropout",
    "attention_dropout": "--attention-dropout",
    "mem_len": "--mem-len",
    "same_length": "--same-length",
}


class TransformerXLLanguageModel(FairseqLanguageModel):
    """A Transformer-XL whose table and output layer, which share it, follow our flags."""

    stateful = True

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerXLLanguageModel":
        """fairseq's hook.

        Raises:
            UnsupportedError: a feature of the host that the chosen table or head cannot take.
            ConfigurationError: flags outside their range, or that contradict each other.
        """
        options = to_namespace(cls, args)
        # Elsewhere this flag names the host's own adaptive softmax, which none of our tables fits.
        refuse_unsupported(Namespace(**{**vars(options), "adaptive_softmax_cutoff": None}))
        dictionary, dim = task.target_dictionary, options.decoder_embed_dim
        # The width of a uniform distribution of this standard deviation.
        table = build_table(options, dictionary, dim, init_range=INIT_STD * math.sqrt(3))
        if isinstance(table, PlainEmbedding):
            nn.init.normal_(table.weight, std=INIT_STD)
            nn.init.zeros_(table.weight[dictionary.pad()])
        with arguments_as_flags(**NETWORK_FLAGS):
            network = TransformerXL(
                table,
                options.decoder_layers,
                options.decoder_attention_heads,
                _head_dim(options),
                options.decoder_ffn_embed_dim,
                dropout=options.dropout,
                attention_dropout=options.attention_dropout,
                mem_len=options.mem_len,
                clamp_len=options.clamp_len,
                same_length=options.same_length,
                init_std=INIT_STD,
            )
        cutoffs = _cutoffs(options)
        head: Any
        if cutoffs:
            _warn_of_rare_words_first(dictionary)
            with arguments_as_flags(cutoffs="--adaptive-softmax-cutoff"):
                head = AdaptiveSoftmaxHead(table, cutoffs, INIT_STD)
        else:
            head = build_head(options, dictionary, dim, table, bias=True)
        return cls(TransformerXLDecoder(dictionary, network, head))

    def check_criterion(self, criterion: Any) -> None:
        """Warn of a criterion that undoes what the clusters save; called before training.

        Raises:
            ConfigurationError: the criterion of the host's own adaptive softmax.
        """
        if isinstance(criterion, AdaptiveLoss):
            raise ConfigurationError(
                "a criterion that asks no more of the model than probabilities",
                "--criterion adaptive_loss, which asks for the host's own adaptive softmax",
                "Use --criterion mle_cosreg --cosreg-weight 0: cross entropy, which computes the "
                "clusters that are hit and no other.",
            )
        head = self.decoder.output_projection
        if isinstance(head, AdaptiveSoftmaxHead) and not isinstance(
            criterion, PenalisedCrossEntropy
        ):
            logger.warning(
                "--criterion %s computes the probability of all %d words for every token; this "
                "package's criterions compute those of the clusters that are hit: use --criterion "
                "mle_cosreg --cosreg-weight 0 for the same loss",
                criterion.__class__.__name__,
                head.table.num_embeddings,
            )


def _head_dim(options: Any) -> int:
    if options.decoder_head_dim is not None:
        return options.decoder_head_dim
    width, heads = options.decoder_embed_dim, options.decoder_attention_heads
    if heads < 1 or width % heads:
        raise ConfigurationError(
            "--decoder-embed-dim to be a multiple of --decoder-attention-heads",
            f"{width} and {heads}",
            "Change one of them, or give --decoder-head-dim.",
        )
    return width // heads


def _warn_of_rare_words_first(dictionary: Any) -> None:
    counts = dictionary.count[dictionary.nspecial :]
    for index, (before, after) in enumerate(zip(counts, counts[1:]), dictionary.nspecial):
        if before < after:
            logger.warning(
                "an adaptive softmax is fast with a dictionary in order of falling counts, as "
                "fairseq-preprocess writes it; here %r (%d) comes before %r (%d)",
                dictionary[index],
                before,
                dictionary[index + 1],
                after,
            )
            return


def _cutoffs(options: Any) -> List[int]:
    """Of ``--adaptive-softmax-cutoff``; empty for an output layer without clusters."""
    text, kind = options.adaptive_softmax_cutoff, str(options.output_head)
    if kind != "softmax":
        if text:
            raise ConfigurationError(
                "--output-head softmax with --adaptive-softmax-cutoff",
                f"--output-head {kind}",
                "Drop one of the two: a mixture is over the whole table.",
            )
        return []
    text = PUBLISHED_CUTOFFS if text is None else text
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigurationError(
            "--adaptive-softmax-cutoff to be whole numbers separated by commas",
            repr(text),
            f"Correct it, for example: {PUBLISHED_CUTOFFS}.",
        ) from None


# A model, not an architecture, for each name: fairseq-hydra-train knows no architectures.
PRESETS: List[Tuple[str, str, Dict[str, Any]]] = [
    ("transformer_xl_wt103", "TransformerXLWT103", {}),
    ("transformer_xl_wt103_small", "TransformerXLWT103Small", {"decoder_layers": 4}),
]

for _name, _class, _sizes in PRESETS:
    _config = with_defaults(TransformerXLConfig, f"{_class}Config", **_sizes)
    _members = {"__doc__": f"``--arch {_name}``.", "__module__": __name__}
    register_model(_name, dataclass=_config)(type(_class, (TransformerXLLanguageModel,), _members))
