"""Checkpoints of fairseq 0.12.2 load, without their dead keys."""

import pytest

from tests.compat.fairseq_process import Fails


def load_stock_checkpoint(keep, extra):
    """Load weights with stock's dead keys into a plain transformer; true if they are all used."""
    from argparse import Namespace

    import torch
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture

    words = Dictionary()
    words.add_symbol("w")

    class Task:
        source_dictionary = target_dictionary = words

    def build(layers, keep):
        size = {"encoder_embed_dim": 8, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
        args = Namespace(arch="transformer", **size, encoder_layers=layers, decoder_layers=1)
        args.encoder_layers_to_keep = keep
        base_architecture(args)
        return TransformerModel.build_model(args, Task())

    source = build(4, None)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    dead = ["in_proj", "out_proj", "fc1", "fc2"]
    for layer in range(4):
        for part in dead:
            for kind in ("weight", "bias"):
                state[f"encoder.layers.{layer}.{part}_{kind}"] = torch.zeros(8)
    if extra is not None:
        state[extra] = torch.zeros(8)

    target = build(2 if keep else 4, keep)
    settings = Namespace(arch="transformer", encoder_layers_to_keep=keep)
    settings.decoder_layers_to_keep = "0" if keep else None
    target.load_state_dict(state, strict=True, model_cfg=settings)
    last = target.encoder.layers[-1].fc1.weight
    return bool(torch.equal(last, source.encoder.layers[-1].fc1.weight))


def has_them_itself():
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    return "_load_from_state_dict" in vars(TransformerEncoderLayerBase)


@pytest.mark.parametrize("keep, extra", [
    (None, None),
    ("0,3", None),  # pruned to two layers
    (None, "encoder.layers.0.fc3_weight"),
    (None, "decoder.layers.0.fc1_weight"),
    (None, "fc1_weight"),
])  # fmt: skip
def test_dead_keys_alone_are_dropped(bare, patched, keep, extra):
    if bare.call(has_them_itself):
        pytest.skip("this fairseq has these parameters itself")
    unexpected = Fails("Unexpected key")
    patched.gives(unexpected if extra else True, load_stock_checkpoint, keep=keep, extra=extra)
    bare.gives(
        Fails("Unexpected key.*in_proj_weight"), load_stock_checkpoint, keep=keep, extra=extra
    )
