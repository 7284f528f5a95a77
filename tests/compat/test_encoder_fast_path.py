"""The fast path of encoders, which current torch refuses."""

import pytest

from spectral_fairseq.compat.encoder_fast_path import ENCODER_FAST_PATH
from tests.compat.fairseq_process import Fails


def encode_with_padding():
    """Whether a loaded layer in evaluation computes what it computes in training."""
    import torch
    from fairseq.models.transformer import TransformerConfig
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    cfg = TransformerConfig()
    cfg.encoder.embed_dim = cfg.encoder.ffn_embed_dim = 8
    cfg.encoder.attention_heads, cfg.dropout = 2, 0.0
    trained, loaded = TransformerEncoderLayerBase(cfg), TransformerEncoderLayerBase(cfg)
    loaded.load_state_dict(trained.state_dict())
    x, padding = torch.randn(3, 2, 8), torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad():
        expected = trained.train()(x, padding)
        found = loaded.eval()(x, padding)
    return bool(torch.allclose(expected, found, atol=1e-6))


@pytest.mark.skipif(
    ENCODER_FAST_PATH.unneeded() is not None, reason=str(ENCODER_FAST_PATH.unneeded())
)
def test_a_batch_with_padding(bare, patched):
    bare.gives(Fails("Mask Type"), encode_with_padding)
    patched.gives(True, encode_with_padding)
