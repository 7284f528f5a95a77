"""fairseq's LSTM encoder-decoder with a mixture of softmaxes: ``--arch lstm_mos``.

Yang, Dai, Salakhutdinov, Cohen, ICLR 2018, section 3.1, https://arxiv.org/abs/1711.03953.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
from typing import Any, Dict

from fairseq.models import lstm
from torch import Tensor

from spectral_fairseq.heads import HeadSpec
from spectral_fairseq.heads.mixture import MixtureHead
from spectral_fairseq.plugin.registry import add_flags_without_defaults, fill_defaults, register
from spectral_fairseq.plugin.table_and_head import (
    SpectralOptions,
    build_head,
    build_table,
    check_sharing,
    has_own_look_up,
    has_own_output,
    refuse_unsupported,
)


class SpectralLSTMDecoder(lstm.LSTMDecoder):
    """fairseq's decoder with ``output_projection`` as its output layer."""

    def output_layer(self, x: Tensor) -> Tensor:
        """Scores of ``x``; fairseq's decoder calls this."""
        return self.output_projection(x)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Give the output layer its table from a plain checkpoint; fairseq calls this.

        A plain ``lstm`` that shares its table stores no output layer, and the other's has a bias,
        which a mixture that starts from it leaves behind.
        """
        source = "embed_tokens" if self.share_input_output_embed else "fc_out"
        weight = state_dict.get(f"{name}.{source}.weight")
        has_output = any(key.startswith(f"{name}.output_projection.") for key in state_dict)
        if weight is None or has_output:
            return
        state_dict[f"{name}.output_projection.weight"] = weight
        if source == "fc_out" and isinstance(self.output_projection, MixtureHead):
            del state_dict[f"{name}.fc_out.weight"], state_dict[f"{name}.fc_out.bias"]


class SpectralLSTM(lstm.LSTMModel):
    """fairseq's ``lstm`` whose tables and output layer follow the flags."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add fairseq's flags, and those of this package without defaults."""
        lstm.LSTMModel.add_args(parser)
        add_flags_without_defaults(cls, parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "SpectralLSTM":
        """Build a model; fairseq calls this."""
        fill_defaults(args, cls.config)
        lstm.base_architecture(args)
        if args.criterion != "adaptive_loss" or has_own_output(args):
            # fairseq always sets this default, and reads it for that criterion only.
            args.adaptive_softmax_cutoff = None
        refuse_unsupported(args)
        check_sharing(args, task)
        model = super().build_model(args, task)
        if has_own_output(args):
            _replace_output(args, model, task)
        return model


def _replace_output(args: Any, model: Any, task: Any) -> None:
    encoder, decoder = model.encoder, model.decoder
    _replace_look_ups(args, encoder, decoder, task)
    if not decoder.share_input_output_embed:
        del decoder.fc_out
    shared = decoder.embed_tokens if decoder.share_input_output_embed else None
    spec = HeadSpec(args.decoder_out_embed_dim)
    decoder.output_projection = build_head(args, task.target_dictionary, spec, shared)
    # fairseq's build_model constructs LSTMDecoder by name. The subclass has the same attributes and
    # only another output_layer, so the instance can change its class.
    decoder.__class__ = SpectralLSTMDecoder


def _replace_look_ups(args: Any, encoder: Any, decoder: Any, task: Any) -> None:
    path = args.decoder_embed_path
    if args.share_all_embeddings:
        path = args.encoder_embed_path  # fairseq fills the table of both sides from this one
    if has_own_look_up(args, decoder.share_input_output_embed):
        decoder.embed_tokens = build_table(
            args, task.target_dictionary, args.decoder_embed_dim, path
        )
    if args.share_all_embeddings:
        encoder.embed_tokens = decoder.embed_tokens
    elif has_own_look_up(args, shared=False):
        encoder.embed_tokens = build_table(
            args, task.source_dictionary, args.encoder_embed_dim, args.encoder_embed_path
        )
    # fairseq froze the tables that these replace.
    if args.encoder_freeze_embed:
        encoder.embed_tokens.requires_grad_(False)
    if args.decoder_freeze_embed:
        decoder.embed_tokens.requires_grad_(False)


register(
    "lstm_mos",
    SpectralLSTM,
    SpectralOptions,
    {"output_head": "mos"},
    {"": lstm.base_architecture},
    legacy=True,
)
