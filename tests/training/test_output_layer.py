"""Which layer of a model holds its table, and what may not happen to it while a method is on it."""

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training import (
    SpectrumControl,
    TablePenalty,
    factor_,
    plain_,
    weight_norm_,
)
from spectral_fairseq.training.output_layer import OUTPUT_LAYERS, output_layer
from tests.training.models import build


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_the_usual_names_of_an_output_layer(name):
    model = nn.Module()
    with pytest.raises(ConfigurationError, match=f"lm_head, .*{OUTPUT_LAYERS[-1]}"):
        output_layer(model)
    setattr(model, name, nn.Linear(4, 30))
    assert output_layer(model) is getattr(model, name)


def test_an_embedding_bag_and_a_weight_are_tables_of_their_own():
    bag = nn.EmbeddingBag(30, 4)
    assert SpectrumControl(bag).weight is bag.weight
    for given in (bag, bag.weight):
        found = TablePenalty(given, cosine=2.0)()
        torch.testing.assert_close(found, TablePenalty(nn.Embedding(30, 4, _weight=bag.weight),
                                                       cosine=2.0)())  # fmt: skip
    for kind in (SpectrumControl, TablePenalty):
        with pytest.raises(ConfigurationError, match="a model, a layer or a weight"):
            kind("model")


@pytest.mark.parametrize("layout", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("put_on", [weight_norm_, factor_])
def test_layers_stay_tied_and_are_not_replaced(transformers, layout, put_on):
    model = build(transformers, layout)
    put_on(model)
    before = output_layer(model).weight.detach()
    model.tie_weights()
    torch.testing.assert_close(output_layer(model).weight.detach(), before)
    for method in ("set_output_embeddings", "set_input_embeddings"):
        with pytest.raises(UnsupportedError, match=f"{method}.*plain_"):
            getattr(model, method)(nn.Linear(4, 5))
    plain_(model)
    model.tie_weights()
    model.set_output_embeddings(model.get_output_embeddings())
