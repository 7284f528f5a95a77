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
            _replace_output(args, model, task.target_dictionary)
        return model


def _replace_output(args: Any, model: Any, dictionary: Any) -> None:
    decoder = model.decoder
    width = args.decoder_out_embed_dim
    shared = None
    if decoder.share_input_output_embed:
        shared = build_table(args, dictionary, args.decoder_embed_dim, args.decoder_embed_path)
        if args.share_all_embeddings:
            model.encoder.embed_tokens = shared
        decoder.embed_tokens = shared
    else:
        del decoder.fc_out
    decoder.output_projection = build_head(args, dictionary, width, shared)
    # The host's build_model names LSTMDecoder itself. Ours has the same attributes and only
    # another output_layer, so the instance can change its class.
    decoder.__class__ = SpectralLSTMDecoder


@register_model_architecture("lstm_mos", "lstm_mos")
def lstm_mos(args: Any) -> None:
    """The sizes of ``lstm``, the mixture of the paper, and our other defaults."""
    for name, default in _defaults().items():
        setattr(args, name, getattr(args, name, default))
    host.base_architecture(args)


def _defaults() -> Dict[str, Any]:
    config = LSTMMoSConfig()
    return {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "_name"}
