"""``--arch awd_lstm_{ptb,wt2}`` and ``awd_lstm_mos_{ptb,wt2}``: word-level language models.

The names are presets with the sizes and dropouts of the public recipes; learning rates, batches
and the optimiser belong to the recipe: see examples/lm_ptb and examples/lm_wikitext2.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import logging
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import torch
from fairseq.models import FairseqLanguageModel, register_model
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.penalties.activation_regularization import (
    activation_regularization,
    temporal_activation_regularization,
)
from spectral_fairseq.lm.awd_lstm import AWDLSTM, TIME, detached
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.plugin.criterions.penalised import PenalisedCrossEntropy
from spectral_fairseq.plugin.flags import finite_nonnegative
from spectral_fairseq.plugin.models.flat_config import to_namespace
from spectral_fairseq.plugin.models.options import (
    SpectralOptions,
    refuse_unsupported,
    with_defaults,
)
from spectral_fairseq.plugin.models.stateful_decoder import StatefulDecoder
from spectral_fairseq.plugin.models.tables import build_head, build_table

logger = logging.getLogger(__name__)

INIT_RANGE = 0.1  # of the published models' tables, uniform


@dataclass
class AWDLSTMConfig(SpectralOptions):
    """Sizes, dropouts and activation regularisation of an AWD-LSTM; defaults as for WikiText-2."""

    decoder_embed_dim: int = field(default=400, metadata={"help": "d, width of the tables"})
    decoder_hidden_size: int = field(
        default=1150, metadata={"help": "width of every LSTM layer but the last"}
    )
    decoder_last_hidden_size: Optional[int] = field(
        default=None,
        metadata={"help": "width of the last layer; a softmax needs d, which is used if unset"},
    )
    decoder_layers: int = field(default=3, metadata={"help": "number of LSTM layers"})
    untied_output: bool = field(
        default=False, metadata={"help": "give the output layer a table of its own"}
    )
    dropout: float = field(
        default=0.4,
        metadata={"help": "on the last layer's outputs; locked: one mask for all times"},
    )
    input_dropout: float = field(default=0.65, metadata={"help": "on embedded words, locked"})
    hidden_dropout: float = field(default=0.2, metadata={"help": "between layers, locked"})
    word_dropout: float = field(
        default=0.1, metadata={"help": "probability that a word type is dropped from the look-up"}
    )
    weight_drop: float = field(
        default=0.5, metadata={"help": "on the hidden-to-hidden matrices (DropConnect)"}
    )
    activation_regularization: float = field(
        default=2.0,
        metadata={"help": "alpha: weight of the mean square of outputs after dropout (AR)"},
    )
    temporal_activation_regularization: float = field(
        default=1.0,
        metadata={"help": "beta: weight of the mean square of outputs' changes in time (TAR)"},
    )


class AWDLSTMDecoder(StatefulDecoder):
    """The network between the tables, fed segment by segment or token by token.

    Args:
        dictionary: of words.
        network: look-up and recurrent layers.
        head: output layer.
        alpha: weight of activation regularisation.
        beta: weight of temporal activation regularisation.
    """

    batch_dim = 1

    def __init__(
        self, dictionary: Any, network: AWDLSTM, head: Any, alpha: float, beta: float
    ) -> None:
        super().__init__(dictionary, network, head)
        self.alpha = alpha
        self.beta = beta

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
            incremental_state: of the host's generators; with it only the last token is read.
            carry: state of the streams of which the rows are segments.
            features_only: give the head's input instead of scores.

        Returns:
            Scores, shape (B, T, N): logits of a softmax, log-probabilities of a mixture; and
            a dictionary with ``features``, the last layer's outputs before dropout, shape
            (B, T, d_h), and in training ``activation_penalties``.

        Raises:
            ConfigurationError: a carry of another number of streams.
        """
        tokens, state = prev_output_tokens, None if carry is None else carry.state
        if incremental_state is not None:
            state = self._cached(incremental_state)
            tokens = tokens if state is None else tokens[:, -1:]
        dropped, raw, after = self.network(tokens, state)
        if carry is not None:
            carry.state = detached(after)
        if incremental_state is not None:
            self._cache(incremental_state, after)
        extra: Dict[str, Any] = {"features": raw, "attn": None}  # the host's search looks for attn
        if self.training:
            extra["activation_penalties"] = self._penalties(dropped, raw, tokens)
        return (dropped if features_only else self.output_layer(dropped)), extra

    def _penalties(
        self, dropped: Tensor, raw: Tensor, tokens: Tensor
    ) -> Dict[str, Tuple[float, Tensor]]:
        counted = tokens.ne(self.dictionary.pad())
        penalties = {}
        with torch.autocast(raw.device.type, enabled=False):
            if self.alpha:
                value = activation_regularization(dropped, counted)
                penalties["activation"] = (self.alpha, value)
            if self.beta:
                value = temporal_activation_regularization(raw, counted)
                penalties["temporal_activation"] = (self.beta, value)
        return penalties


# The flag of each argument of the network, for its error messages.
NETWORK_FLAGS = {
    "layers": "--decoder-layers",
    "hidden_dim": "--decoder-hidden-size",
    "last_dim": "--decoder-last-hidden-size",
    "dropout": "--dropout",
    "input_dropout": "--input-dropout",
    "hidden_dropout": "--hidden-dropout",
    "word_dropout": "--word-dropout",
    "weight_drop": "--weight-drop",
}


class AWDLSTMLanguageModel(FairseqLanguageModel):
    """An AWD-LSTM whose tables and output layer follow our flags."""

    stateful = True

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "AWDLSTMLanguageModel":
        """fairseq's hook.

        Raises:
            UnsupportedError: a feature of the host that the chosen table or head cannot take.
            ConfigurationError: flags outside their range, or that contradict each other.
        """
        options = to_namespace(cls, args)
        refuse_unsupported(options)
        dictionary = task.target_dictionary
        dim = options.decoder_embed_dim
        last = options.decoder_last_hidden_size or dim
        if str(options.output_head) == "softmax" and last != dim:
            raise ConfigurationError(
                f"--decoder-last-hidden-size {dim}, the table's width, with --output-head softmax",
                str(last),
                "Drop the flag, give --decoder-embed-dim the same value, or use a mixture.",
            )
        shared = not options.untied_output
        table = cls._build_look_up(options, dictionary, dim, shared)
        with arguments_as_flags(**NETWORK_FLAGS):
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
        head = build_head(options, dictionary, last, table, bias=True, locked_dim=TIME)
        with arguments_as_flags(value="--activation-regularization"):
            alpha = finite_nonnegative(options.activation_regularization)
        with arguments_as_flags(value="--temporal-activation-regularization"):
            beta = finite_nonnegative(options.temporal_activation_regularization)
        return cls(AWDLSTMDecoder(dictionary, network, head, alpha, beta))

    def check_criterion(self, criterion: Any) -> None:
        """Warn of a criterion that leaves the activations alone; called before training."""
        if (self.decoder.alpha or self.decoder.beta) and not isinstance(
            criterion, PenalisedCrossEntropy
        ):
            logger.warning(
                "--criterion %s trains without --activation-regularization %g and "
                "--temporal-activation-regularization %g, which only this package's criterions "
                "apply: use --criterion mle_cosreg --cosreg-weight 0 for them alone",
                criterion.__class__.__name__,
                self.decoder.alpha,
                self.decoder.beta,
            )

    @staticmethod
    def _build_look_up(options: Any, dictionary: Any, dim: int, shared: bool) -> Any:
        if not shared and str(options.embedding_tables) == "output":
            options = type(options)(**{**vars(options), "embedding_type": "plain"})
        return build_table(options, dictionary, dim, init_range=INIT_RANGE)


_PTB: Dict[str, Any] = {"input_dropout": 0.4, "hidden_dropout": 0.25}
_MOS_PTB: Dict[str, Any] = {
    "output_head": "mos",
    "mixture_dropout": 0.29,
    "decoder_embed_dim": 280,
    "decoder_hidden_size": 960,
    "decoder_last_hidden_size": 620,
    "input_dropout": 0.4,
    "hidden_dropout": 0.225,
}
_MOS_WT2: Dict[str, Any] = {
    "output_head": "mos",
    "mixture_dropout": 0.29,
    "decoder_embed_dim": 300,
    "decoder_hidden_size": 1150,
    "decoder_last_hidden_size": 650,
    "input_dropout": 0.55,
}

# A model, not an architecture, for each name: fairseq-hydra-train knows no architectures.
PRESETS: List[Tuple[str, str, Dict[str, Any]]] = [
    ("awd_lstm_ptb", "AWDLSTMPTB", _PTB),
    ("awd_lstm_wt2", "AWDLSTMWT2", {}),
    ("awd_lstm_mos_ptb", "AWDLSTMMoSPTB", _MOS_PTB),
    ("awd_lstm_mos_wt2", "AWDLSTMMoSWT2", _MOS_WT2),
]

for _name, _class, _sizes in PRESETS:
    _config = with_defaults(AWDLSTMConfig, f"{_class}Config", **_sizes)
    _members = {"__doc__": f"``--arch {_name}``.", "__module__": __name__}
    register_model(_name, dataclass=_config)(type(_class, (AWDLSTMLanguageModel,), _members))
