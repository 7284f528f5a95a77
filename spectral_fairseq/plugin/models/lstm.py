"""``--arch lstm_mos``: fairseq's LSTM encoder-decoder with a mixture output (MoS, section 3.1)."""

from __future__ import annotations

from typing import Any, Dict

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import lstm as host
from fairseq.models import register_model, register_model_architecture
from torch import Tensor

from spectral_fairseq.plugin.models.options import (
    SpectralOptions,
    has_own_output,
    refuse_unsupported,
    with_defaults,
)
from spectral_fairseq.plugin.models.tables import build_head, build_table

LSTMMoSConfig = with_defaults(SpectralOptions, "LSTMMoSConfig", output_head="mos")


class SpectralLSTMDecoder(host.LSTMDecoder):
    """The host's decoder with ``output_projection`` as its output layer; see :class:`LSTMMoS`."""

    def output_layer(self, x: Tensor) -> Tensor:
        """fairseq's hook."""
        return self.output_projection(x)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """fairseq's hook: a plain ``lstm`` that shares its table stores no output layer."""
        weight = state_dict.get(f"{name}.embed_tokens.weight")
        ours = any(key.startswith(f"{name}.output_projection.") for key in state_dict)
        if self.share_input_output_embed and weight is not None and not ours:
            state_dict[f"{name}.output_projection.weight"] = weight


@register_model("lstm_mos")
class LSTMMoS(host.LSTMModel):
    """fairseq's ``lstm`` whose tables and output layer follow our flags."""

    @staticmethod
    def add_args(parser: Any) -> None:
        """The host's flags, and ours without defaults, which the preset fills in."""
        host.LSTMModel.add_args(parser)
        gen_parser_from_dataclass(parser, LSTMMoSConfig(), delete_default=True)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> LSTMMoS:
        """fairseq's hook.

        Raises:
            UnsupportedError: a feature of the host that the chosen table or head cannot take.
            ConfigurationError: flags that contradict each other.
        """
        lstm_mos(args)
        if args.criterion != "adaptive_loss":
            # The host's preset fills this in for everybody and reads it for that criterion only.
            args.adaptive_softmax_cutoff = None
        refuse_unsupported(args)
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
    width = args.decoder_out_embed_dim
    decoder.output_projection = build_head(args, task.target_dictionary, width, shared)
    # The host's build_model names LSTMDecoder itself. Ours has the same attributes and only
    # another output_layer, so the instance can change its class.
    decoder.__class__ = SpectralLSTMDecoder


def _replace_look_ups(args: Any, encoder: Any, decoder: Any, task: Any) -> None:
    all_tables = str(args.embedding_tables) == "all"
    path = args.decoder_embed_path
    if args.share_all_embeddings:
        path = args.encoder_embed_path  # the host fills the table of both sides from this one
    if decoder.share_input_output_embed or all_tables:
        decoder.embed_tokens = build_table(
            args, task.target_dictionary, args.decoder_embed_dim, path
        )
    if args.share_all_embeddings:
        encoder.embed_tokens = decoder.embed_tokens
    elif all_tables:
        encoder.embed_tokens = build_table(
            args, task.source_dictionary, args.encoder_embed_dim, args.encoder_embed_path
        )
    # The host froze the tables that these replace.
    if args.encoder_freeze_embed:
        encoder.embed_tokens.requires_grad_(False)
    if args.decoder_freeze_embed:
        decoder.embed_tokens.requires_grad_(False)


@register_model_architecture("lstm_mos", "lstm_mos")
def lstm_mos(args: Any) -> None:
    """The sizes of ``lstm``, the mixture of the paper, and our other defaults."""
    for name, default in _defaults().items():
        setattr(args, name, getattr(args, name, default))
    host.base_architecture(args)


def _defaults() -> Dict[str, Any]:
    config = LSTMMoSConfig()
    return {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "_name"}
