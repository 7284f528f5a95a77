"""``--arch transformer_xl_wt103`` and ``transformer_xl_wt103_small``: Transformer-XL.

Dai, Yang, Yang, Carbonell, Le, Salakhutdinov: "Transformer-XL: Attentive Language Models beyond a
Fixed-Length Context", ACL 2019, https://aclanthology.org/P19-1285. The sizes are those of its
WikiText-103 base model; the small model of Wang et al., ICLR 2020,
https://openreview.net/forum?id=ByxY8CNtvr, has 4 layers instead of 16. Learning rates, batches and
segment lengths belong to a recipe: see examples/lm_wikitext103.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import logging
import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple, Type

from fairseq.models import FairseqLanguageModel
from torch import Tensor, nn

from spectral_fairseq.embeddings import PlainEmbedding
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.heads import AdaptiveSoftmaxHead, Head, HeadSpec, SoftmaxHead
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.transformer_xl import TransformerXL
from spectral_fairseq.options import option
from spectral_fairseq.plugin.counts import known_counts
from spectral_fairseq.plugin.flat_transformer import to_namespace
from spectral_fairseq.plugin.registry import flags_of, register
from spectral_fairseq.plugin.stateful_decoder import StatefulDecoder
from spectral_fairseq.plugin.table_and_head import (
    IN_A_TRANSFORMER,
    SpectralOptions,
    build_head,
    build_table,
    head_kind,
    refuse_unsupported,
)

logger = logging.getLogger(__name__)

# The published model draws all weights from N(0, 0.02^2).
INIT_STD = 0.02

# The share of the training data's words that may be in a later cluster than their counts ask for,
# before a warning says so: a dictionary of other text has another order in its tail.
MISPLACED_SHARE = 0.02

# Arguments of the network whose names differ from those of the flags.
ARGUMENT_FLAGS = {
    "layers": "--decoder-layers",
    "heads": "--decoder-attention-heads",
    "head_dim": "--decoder-head-dim",
    "ffn_dim": "--decoder-ffn-embed-dim",
}


@dataclass
class TransformerXLConfig(SpectralOptions):
    """Sizes, dropouts and memory of a Transformer-XL; defaults as for WikiText-103."""

    decoder_embed_dim: int = option(410, "d: width of the table and of every layer")
    decoder_layers: int = option(16, "number of layers")
    decoder_attention_heads: int = option(10, "number of attention heads")
    decoder_head_dim: Optional[int] = option(None, "width of an attention head; d / heads if unset")
    decoder_ffn_embed_dim: int = option(2100, "width of the feed-forward parts")
    dropout: float = option(0.1, "dropout on embeddings, positions, layers and the output")
    attention_dropout: float = option(0.0, "dropout on attention probabilities")
    mem_len: int = option(150, "number of positions before a segment that are remembered")
    clamp_len: int = option(
        0, "encode greater distances between positions as this one; 0 for no limit"
    )
    same_length: bool = option(
        False, "let every position see exactly --mem-len positions, itself included"
    )
    adaptive_softmax_cutoff: Optional[str] = AdaptiveSoftmaxHead.options[0].field


class TransformerXLDecoder(StatefulDecoder):
    """A Transformer-XL with its output layer."""

    def read(self, tokens: Tensor, carry: Optional[Carry]) -> Tuple[Tensor, Dict[str, Any]]:
        """Read a segment with the memory of the segments before it."""
        features, raw, after, layers = self.network(tokens, None if carry is None else carry.state)
        if carry is not None:
            carry.state = after
        return features, {"features": raw, "inner_states": [x.transpose(0, 1) for x in layers]}

    def step(self, tokens: Tensor, incremental_state: Any) -> Tuple[Tensor, Dict[str, Any]]:
        """Read the tokens that the search does not hold yet; it forgets none of them."""
        cache = self._cached(incremental_state)
        known = 0 if cache is None else cache[0][0].size(2)
        features, cache = self.network.step(tokens[:, known:], cache)
        self._cache(incremental_state, cache)
        return features, {"features": features}


class TransformerXLLanguageModel(FairseqLanguageModel):
    """A Transformer-XL whose shared table and output layer follow the flags."""

    stateful = True

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerXLLanguageModel":
        """Build a model; fairseq calls this."""
        options = to_namespace(cls, args)
        # Elsewhere this flag stands for fairseq's adaptive softmax, which fits none of the tables.
        refuse_unsupported(Namespace(**{**vars(options), "adaptive_softmax_cutoff": None}))
        dictionary, dim = task.target_dictionary, options.decoder_embed_dim
        # The width of a uniform distribution of this standard deviation.
        table = build_table(options, dictionary, dim, init_range=INIT_STD * math.sqrt(3))
        if isinstance(table, PlainEmbedding):
            nn.init.normal_(table.weight, std=INIT_STD)
            nn.init.zeros_(table.weight[dictionary.pad()])
        with arguments_as_flags(**ARGUMENT_FLAGS, **flags_of(TransformerXLConfig)):
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
        kind = _head_kind(options)
        spec = HeadSpec(dim, bias=True, init_std=INIT_STD)
        head = build_head(options, dictionary, spec, table, kind)
        if isinstance(head, AdaptiveSoftmaxHead):
            _warn_of_rare_words_first(dictionary, head.cutoffs)
        return cls(TransformerXLDecoder(dictionary, network, head))

    def warn_of_other_criterion(self, name: str) -> None:
        """Warn, before training, that a criterion of fairseq computes all words of all clusters."""
        head = self.decoder.output_projection
        if isinstance(head, AdaptiveSoftmaxHead):
            logger.warning(
                "--criterion %s computes the probability of all %d words for every token; this "
                "package's criterions compute only the clusters of the targets: use --criterion "
                "regularized_cross_entropy for the same loss",
                name,
                head.table.num_embeddings,
            )


def _head_dim(options: Any) -> int:
    if options.decoder_head_dim is not None:
        return options.decoder_head_dim
    width, heads = options.decoder_embed_dim, options.decoder_attention_heads
    if heads < 1 or width % heads:
        wanted = "--decoder-embed-dim to be a multiple of --decoder-attention-heads"
        remedy = "Change one of them, or give --decoder-head-dim."
        raise ConfigurationError(wanted, f"{width} and {heads}", remedy)
    return width // heads


def _warn_of_rare_words_first(dictionary: Any, cutoffs: Sequence[int]) -> None:
    counts = known_counts(dictionary)
    total = sum(counts or ())
    if not counts or not total:
        return
    special = dictionary.nspecial  # which are always first
    falling = counts[:special] + sorted(counts[special:], reverse=True)
    for cutoff in cutoffs:
        behind, least = (sum(order[cutoff:]) / total for order in (counts, falling))
        if behind > least + MISPLACED_SHARE:
            logger.warning(
                "an adaptive softmax is fast with a dictionary in order of falling counts, as "
                "fairseq-preprocess writes it; here %.0f%% of the words in the training data come "
                "after the first %d of the dictionary, and %.0f%% would in that order",
                100 * behind,
                cutoff,
                100 * least,
            )
            return


def _head_kind(options: Any) -> Type[Head]:
    """The output layer; ``--output-head softmax`` is an adaptive one unless its cutoffs are ''."""
    kind, cutoffs = head_kind(options), options.adaptive_softmax_cutoff
    if kind is SoftmaxHead:
        return SoftmaxHead if cutoffs == "" else AdaptiveSoftmaxHead
    if cutoffs:
        wanted, found = "--output-head softmax with --adaptive-softmax-cutoff", options.output_head
        remedy = "Drop one of the two: the other output layers take the whole table."
        raise ConfigurationError(wanted, found, remedy)
    return kind


PRESETS: Dict[str, Dict[str, Any]] = {
    "transformer_xl_wt103": IN_A_TRANSFORMER,
    "transformer_xl_wt103_small": {"decoder_layers": 4, **IN_A_TRANSFORMER},
}

for _name, _preset in PRESETS.items():
    register(_name, TransformerXLLanguageModel, TransformerXLConfig, _preset)
