"""``--arch awd_lstm_{ptb,wt2}`` and ``awd_lstm_mos_{ptb,wt2}``: word-level language models.

The network is :class:`~spectral_fairseq.lm.awd_lstm.AWDLSTM`. The presets have the sizes and
dropouts of the public recipes, those with ``mos`` of the paper on mixtures of softmaxes. Learning
rates, batches and the optimiser belong to a recipe: see examples/lm_ptb and examples/lm_wikitext2.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import logging
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from fairseq.models import FairseqLanguageModel
from torch import Tensor

from spectral_fairseq.errors import arguments_as_flags, check_alike
from spectral_fairseq.functional.activation_penalties import (
    activation_regularization,
    temporal_activation_regularization,
)
from spectral_fairseq.heads import Head, HeadSpec
from spectral_fairseq.lm.awd_lstm import AWDLSTM, TIME, detached
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.options import check_ranges, option
from spectral_fairseq.plugin.flat_transformer import to_namespace
from spectral_fairseq.plugin.registry import flags_of, register
from spectral_fairseq.plugin.stateful_decoder import StatefulDecoder
from spectral_fairseq.plugin.table_and_head import (
    SpectralOptions,
    build_head,
    build_table,
    has_own_look_up,
    head_kind,
    refuse_unsupported,
)

logger = logging.getLogger(__name__)

# The published models initialise their tables uniformly in [-0.1, 0.1].
INIT_RANGE = 0.1

# Arguments of the network whose names differ from those of the flags.
ARGUMENT_FLAGS = {
    "hidden_dim": "--decoder-hidden-size",
    "last_dim": "--decoder-last-hidden-size",
    "layers": "--decoder-layers",
}


@dataclass
class AWDLSTMConfig(SpectralOptions):
    """Sizes, dropouts and activation regularisation of an AWD-LSTM; defaults as for WikiText-2."""

    decoder_embed_dim: int = option(400, "d: width of the tables")
    decoder_hidden_size: int = option(1150, "width of every LSTM layer but the last")
    decoder_last_hidden_size: Optional[int] = option(
        None, "width of the last LSTM layer; a softmax needs d, which is used if unset"
    )
    decoder_layers: int = option(3, "number of LSTM layers")
    untied_output: bool = option(False, "give the output layer a table of its own")
    dropout: float = option(0.4, "dropout on the last layer's outputs, with one mask for all times")
    input_dropout: float = option(0.65, "dropout on embedded words, with one mask for all times")
    hidden_dropout: float = option(0.2, "dropout between layers, with one mask for all times")
    word_dropout: float = option(0.1, "probability that a word type is dropped from the look-up")
    weight_drop: float = option(0.5, "dropout on the hidden-to-hidden matrices (DropConnect)")
    activation_regularization: float = option(
        2.0, "alpha: weight of the mean square of the outputs after dropout (AR)", at_least=0
    )
    temporal_activation_regularization: float = option(
        1.0, "beta: weight of the mean square of the outputs' changes in time (TAR)", at_least=0
    )


class AWDLSTMDecoder(StatefulDecoder):
    """An AWD-LSTM between its tables; in training it gives the penalties on its activations.

    Args:
        dictionary: fairseq dictionary.
        network: look-up and recurrent layers.
        head: output layer.
        alpha: weight of AR.
        beta: weight of TAR.
    """

    batch_dim = 1

    def __init__(
        self, dictionary: Any, network: AWDLSTM, head: Head, alpha: float, beta: float
    ) -> None:
        super().__init__(dictionary, network, head)
        self.alpha = alpha
        self.beta = beta

    def read(self, tokens: Tensor, carry: Optional[Carry]) -> Tuple[Tensor, Dict[str, Any]]:
        """Read a segment; the dictionary has ``activation_penalties`` in training."""
        dropped, raw, after = self.network(tokens, None if carry is None else carry.state)
        if carry is not None:
            carry.state = detached(after)
        extra: Dict[str, Any] = {"features": raw}
        if self.training:
            extra["activation_penalties"] = self._penalties(dropped, raw, tokens)
        return dropped, extra

    def step(self, tokens: Tensor, incremental_state: Any) -> Tuple[Tensor, Dict[str, Any]]:
        """Read the last token, or all of them in the first step of a search."""
        state = self._cached(incremental_state)
        dropped, raw, after = self.network(tokens if state is None else tokens[:, -1:], state)
        self._cache(incremental_state, after)
        return dropped, {"features": raw}

    def _penalties(
        self, dropped: Tensor, raw: Tensor, tokens: Tensor
    ) -> Dict[str, Tuple[float, Tensor]]:
        counted = tokens.ne(self.dictionary.pad())
        penalties = {}
        if self.alpha:
            value = activation_regularization(dropped, counted)
            penalties["activation"] = (self.alpha, value)
        if self.beta:
            value = temporal_activation_regularization(raw, counted)
            penalties["temporal_activation"] = (self.beta, value)
        return penalties


class AWDLSTMLanguageModel(FairseqLanguageModel):
    """An AWD-LSTM whose tables and output layer follow the flags."""

    stateful = True

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "AWDLSTMLanguageModel":
        """Build a model; fairseq calls this."""
        options = to_namespace(cls, args)
        refuse_unsupported(options)
        dictionary = task.target_dictionary
        dim = options.decoder_embed_dim
        last = options.decoder_last_hidden_size or dim
        if not head_kind(options).any_width:
            widths = {"--decoder-last-hidden-size": last, "--decoder-embed-dim": dim}
            remedy = "Make them equal, or use a mixture."
            check_alike(f"one width with --output-head {options.output_head}", widths, remedy)
        shared = not options.untied_output
        look_up = options
        if not has_own_look_up(options, shared):
            look_up = Namespace(**{**vars(options), "embedding_type": "plain"})
        table = build_table(look_up, dictionary, dim, init_range=INIT_RANGE)
        with arguments_as_flags(**ARGUMENT_FLAGS, **flags_of(AWDLSTMConfig)):
            network = AWDLSTM(
                table,
                options.decoder_hidden_size,
                last,
                options.decoder_layers,
                dropout=options.dropout,
                input_dropout=options.input_dropout,
                hidden_dropout=options.hidden_dropout,
                word_dropout=options.word_dropout,
                weight_drop=options.weight_drop,
            )
        if not shared:
            table = build_table(options, dictionary, dim, init_range=INIT_RANGE)
        head = build_head(options, dictionary, HeadSpec(last, bias=True, locked_dim=TIME), table)
        check_ranges(options, AWDLSTMConfig)
        alpha = options.activation_regularization
        beta = options.temporal_activation_regularization
        return cls(AWDLSTMDecoder(dictionary, network, head, alpha, beta))

    def warn_of_other_criterion(self, name: str) -> None:
        """Warn, before training, that a criterion of fairseq adds no AR and no TAR to its loss."""
        if self.decoder.alpha or self.decoder.beta:
            logger.warning(
                "--criterion %s trains without --activation-regularization %g and "
                "--temporal-activation-regularization %g, which only this package's criterions "
                "apply: use --criterion regularized_cross_entropy for them alone",
                name,
                self.decoder.alpha,
                self.decoder.beta,
            )


_MOS: Dict[str, Any] = {"output_head": "mos", "mixture_dropout": 0.29}

PRESETS: Dict[str, Dict[str, Any]] = {
    "awd_lstm_ptb": {"input_dropout": 0.4, "hidden_dropout": 0.25},
    "awd_lstm_wt2": {},
    "awd_lstm_mos_ptb": {
        **_MOS,
        "decoder_embed_dim": 280,
        "decoder_hidden_size": 960,
        "decoder_last_hidden_size": 620,
        "input_dropout": 0.4,
        "hidden_dropout": 0.225,
    },
    "awd_lstm_mos_wt2": {
        **_MOS,
        "decoder_embed_dim": 300,
        "decoder_last_hidden_size": 650,
        "input_dropout": 0.55,
    },
}

for _name, _preset in PRESETS.items():
    register(_name, AWDLSTMLanguageModel, AWDLSTMConfig, _preset)
