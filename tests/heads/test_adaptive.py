"""The adaptive softmax as an output layer."""

import pytest
import torch

from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.heads import AdaptiveSoftmaxHead
from tests.heads.test_heads import CUTOFFS, DIM, PAD, WORDS, batch, head


def test_a_factored_table_is_not_multiplied_out(monkeypatch):
    module, (features, targets) = head(AdaptiveSoftmaxHead, "svd"), batch(DIM)

    def built(self):
        raise AssertionError("W was built")

    monkeypatch.setattr(SVDEmbedding, "weight", property(built))
    module(features)
    module.loss(features, targets)[0].backward()


def test_the_same_checkpoint_serves_every_table():
    plain = head(AdaptiveSoftmaxHead).double()
    svd = AdaptiveSoftmaxHead(SVDEmbedding(WORDS, DIM, PAD), CUTOFFS).double()
    state = {f"head.{key}": value for key, value in plain.state_dict().items()}
    svd.table.upgrade_state_dict_named(state, "head.table")
    svd.load_state_dict({key[len("head.") :]: value for key, value in state.items()})
    features = batch(DIM)[0].double()
    torch.testing.assert_close(svd(features), plain(features), rtol=1e-6, atol=1e-6)


def test_what_the_adaptive_softmax_cannot_do_is_refused():
    with pytest.raises(ConfigurationError, match="`label_smoothing` 0"):
        head(AdaptiveSoftmaxHead).loss(*batch(DIM), 0.1, PAD)
    with pytest.raises(ConfigurationError, match="below 41"):
        AdaptiveSoftmaxHead(PlainEmbedding(WORDS, DIM, PAD), (20, 41))
