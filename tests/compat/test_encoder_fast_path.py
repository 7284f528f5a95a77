"""Encoders of fairseq 0.12.2 evaluate batches with padding under newer versions of torch."""

from __future__ import annotations

import pytest

from spectral_fairseq.compat.machines import ENCODER_FAST_PATH as PATCH
from tests.compat.fairseq_process import Failure, FairseqProcess

if PATCH.unneeded() is not None:
    pytest.skip(str(PATCH.unneeded()), allow_module_level=True)


def encode_with_padding() -> bool:
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


def test_a_batch_with_padding(bare: FairseqProcess, patched: FairseqProcess) -> None:
    with pytest.raises(Failure, match="Mask Type"):
        bare.call(encode_with_padding)
    assert patched.call(encode_with_padding)
