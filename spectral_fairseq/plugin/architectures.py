"""fairseq's own architectures with tables and output layers of this package.

``--arch transformer_{sc,wn,mos}``, with fairseq's sizes behind the name, and the language models
``transformer_lm_{sc,wn,mos}``; ``--arch lstm_mos`` is the LSTM encoder-decoder with a mixture of
softmaxes of Yang, Dai, Salakhutdinov, Cohen, ICLR 2018, section 3.1,
https://arxiv.org/abs/1711.03953.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
from dataclasses import dataclass
from typing import Any, Dict, Optional

from fairseq.models import lstm, transformer_lm
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerModelBase,
    transformer_legacy,
)
from fairseq.modules import BaseLayer
from omegaconf import II
from torch import Tensor, nn

from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import check_alike
from spectral_fairseq.heads import HeadSpec
from spectral_fairseq.heads.mixture import MixtureHead
from spectral_fairseq.options import option
from spectral_fairseq.plugin.registry import (
    IN_A_TRANSFORMER,
    FillSizes,
    FlatTransformerConfig,
    SpectralOptions,
    add_flags_without_defaults,
    build_head,
    build_table,
    check_sharing,
    fill_defaults,
    has_own_output,
    refuse_unsupported,
    register,
    to_namespace,
)

# fairseq's Transformer decoder with an output layer of this package.


class SpectralTransformerDecoder(TransformerDecoderBase):
    """Differs from its base class only in ``output_projection``."""

    def build_output_projection(self, cfg: Any, dictionary: Any, embed_tokens: Any) -> None:
        """Build the output layer; fairseq calls this while it builds the decoder.

        Raises:
            ConfigurationError: the hidden states are not as wide as the output layer's table.
        """
        if not has_own_output(cfg):
            super().build_output_projection(cfg, dictionary, embed_tokens)
            return
        if self.project_out_dim is None:
            widths = {
                "--decoder-output-dim": self.output_embed_dim,
                "--decoder-embed-dim": cfg.decoder.embed_dim,
            }
            remedy = "Make them equal, or leave out --tie-adaptive-weights, which needs that."
            check_alike("one width of hidden states and table", widths, remedy)
        shared = embed_tokens if self.share_input_output_embed else None
        spec = HeadSpec(self.output_embed_dim)
        self.output_projection = build_head(cfg, dictionary, spec, shared)
        # fairseq adds the layers of --base-layers here, which have no other place to be added at.
        for index in range(cfg.base_layers):
            place = (index + 1) * cfg.decoder.layers // (cfg.base_layers + 1)
            self.layers.insert(place, BaseLayer(cfg))


# An architecture has the sizes of fairseq's own with the same suffix.
SIZES: Dict[str, FillSizes] = {
    "": transformer_legacy.base_architecture,
    "_iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
    "_wmt_en_de": transformer_legacy.transformer_wmt_en_de,
    "_vaswani_wmt_en_de_big": transformer_legacy.transformer_vaswani_wmt_en_de_big,
    "_wmt_en_de_big_t2t": transformer_legacy.transformer_wmt_en_de_big_t2t,
}


@dataclass
class SpectralTransformerConfig(SpectralOptions, FlatTransformerConfig):
    """Every flag of the installed fairseq's Transformer and of this package's tables and heads."""


class SpectralTransformer(TransformerModelBase):
    """An encoder-decoder Transformer whose tables and output layer follow the flags."""

    add_args = classmethod(add_flags_without_defaults)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SpectralTransformer":
        """Build a model; fairseq calls this."""
        options = to_namespace(cls, cfg)
        refuse_unsupported(options)
        check_sharing(options, task)
        return super().build_model(TransformerConfig.from_namespace(options), task)

    @classmethod
    def build_embedding(
        cls, cfg: Any, dictionary: Any, embed_dim: int, path: Optional[str] = None
    ) -> nn.Module:
        """Build a look-up table; fairseq calls this once for each of them."""
        shared = cfg.share_all_embeddings or getattr(cfg, "merge_src_tgt_embed", False)
        if has_own_output(cfg) and (shared or str(cfg.embedding_tables) == "all"):
            return build_table(cfg, dictionary, embed_dim, path)
        return super().build_embedding(cfg, dictionary, embed_dim, path)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: Any) -> nn.Module:
        """Build the decoder; fairseq calls this."""
        if has_own_output(cfg) and cfg.share_decoder_input_output_embed:
            if not isinstance(embed_tokens, Table):  # not shared with the encoder
                embed_tokens = build_table(
                    cfg, tgt_dict, cfg.decoder.embed_dim, cfg.decoder.embed_path
                )
        return SpectralTransformerDecoder(
            cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention
        )


for _name, _preset in (
    ("transformer_sc", {"embedding_type": "svd", **IN_A_TRANSFORMER}),
    ("transformer_wn", {"embedding_type": "weight-norm", **IN_A_TRANSFORMER}),
    ("transformer_mos", {"output_head": "mos", **IN_A_TRANSFORMER}),
):
    register(_name, SpectralTransformer, SpectralTransformerConfig, _preset, SIZES)


# Language-model architectures: fairseq's Transformer decoder with controlled embeddings.


BASE: Dict[str, FillSizes] = {"": transformer_lm.base_lm_architecture}
BASE_AND_GPT: Dict[str, FillSizes] = {**BASE, "_gpt": transformer_lm.transformer_lm_gpt}


@dataclass
class SpectralTransformerLMConfig(SpectralOptions, transformer_lm.TransformerLanguageModelConfig):
    """Every flag of fairseq's ``transformer_lm`` and of this package's tables and heads.

    The table and the output are as wide as the layers unless told otherwise. In fairseq they keep
    512 dimensions whatever ``decoder_embed_dim`` is, except under a named ``--arch``.
    """

    decoder_input_dim: int = option(
        II("model.decoder_embed_dim"),
        "width of the table of look-ups; --decoder-embed-dim if unset",
    )
    decoder_output_dim: int = option(
        II("model.decoder_embed_dim"),
        "width of the output layer's table; --decoder-embed-dim if unset",
    )


class SpectralTransformerLM(transformer_lm.TransformerLanguageModel):
    """A Transformer language model whose table and output layer follow the flags."""

    add_args = classmethod(add_flags_without_defaults)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "SpectralTransformerLM":
        """Build a model; fairseq calls this."""
        options = to_namespace(cls, args)
        refuse_unsupported(options)
        if not has_own_output(options):
            return super().build_model(options, task)
        if options.decoder_layers_to_keep:
            options.decoder_layers = len(options.decoder_layers_to_keep.split(","))
        if getattr(options, "max_target_positions", None) is None:
            options.max_target_positions = getattr(
                options, "tokens_per_sample", transformer_lm.DEFAULT_MAX_TARGET_POSITIONS
            )
        config = TransformerConfig.from_namespace(options)
        table = cls.build_embedding(config, task.source_dictionary, options.decoder_input_dim)
        return cls(
            SpectralTransformerDecoder(config, task.target_dictionary, table, no_encoder_attn=True)
        )

    @classmethod
    def build_embedding(
        cls, args: Any, dictionary: Any, embed_dim: int, path: Optional[str] = None
    ) -> nn.Module:
        """Build the look-up table; fairseq calls this."""
        shared = args.share_decoder_input_output_embed
        if has_own_output(args) and (shared or str(args.embedding_tables) == "all"):
            return build_table(args, dictionary, embed_dim, path)
        return super().build_embedding(args, dictionary, embed_dim, path)


for _name, _preset, _sizes in (
    ("transformer_lm_sc", {"embedding_type": "svd", **IN_A_TRANSFORMER}, BASE_AND_GPT),
    ("transformer_lm_wn", {"embedding_type": "weight-norm", **IN_A_TRANSFORMER}, BASE_AND_GPT),
    ("transformer_lm_mos", {"output_head": "mos", **IN_A_TRANSFORMER}, BASE),
):
    register(_name, SpectralTransformerLM, SpectralTransformerLMConfig, _preset, _sizes)


# fairseq's LSTM encoder-decoder with a mixture of softmaxes.


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
    all_tables = str(args.embedding_tables) == "all"
    path = args.decoder_embed_path
    if args.share_all_embeddings:
        path = args.encoder_embed_path  # fairseq fills the table of both sides from this one
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
