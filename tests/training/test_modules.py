"""Which layer of a model holds its table, and what may not happen to it while a method is on it."""

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError
from spectral_fairseq.training import (
    SpectrumControl,
    TablePenalty,
    factor_,
    fused_loss_,
    plain_,
    weight_norm_,
)
from spectral_fairseq.training.modules import OUTPUT_LAYERS, output_layer
from tests.training.models import IDS, WORDS, build

NAN = float("nan")


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


@pytest.mark.parametrize("put_on", [weight_norm_, factor_])
@pytest.mark.parametrize("number", [NAN, float("inf")])
def test_a_table_with_numbers_that_are_none_gets_no_method(put_on, number):
    layer = nn.Linear(6, 30, bias=False)
    layer.weight.data[3, 2] = number
    with pytest.raises(DataError, match="1 of 30 rows"):
        put_on(layer)
    assert type(layer) is nn.Linear
    if put_on is weight_norm_:
        with pytest.raises(DataError, match="1 of 30 rows"):
            put_on(layer, counts=range(30))


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_counts_are_numbers_of_any_kind(kind, recwarn):
    counts = [5.0, 0.0, 1.0, *range(2, 29)]
    table = weight_norm_(nn.Linear(6, 30, bias=False), counts=kind(counts), sigma=0.2)
    expected = 0.2 * torch.tensor(counts).clamp(min=1).log1p()
    torch.testing.assert_close(table.g.detach(), expected)
    assert not recwarn.list
    for wrong in (30 * [0], 30 * [1], [-1, *range(29)], [NAN, *range(29)]):
        with pytest.raises(DataError, match="torch.bincount"):
            weight_norm_(nn.Linear(6, 30, bias=False), counts=kind(wrong))


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


def _peft(model, **settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(model, config)


def test_the_trained_copy_of_peft_is_the_output_layer(transformers):
    model = _peft(build(transformers, "llama"), target_modules=["q_proj"],
                  modules_to_save=["lm_head"])  # fmt: skip
    own = model(input_ids=IDS, labels=IDS).loss
    own.backward()
    saved = output_layer(model)
    assert saved is model.base_model.model.lm_head.modules_to_save["default"]
    expected = saved.weight.grad.clone()
    saved.weight.grad = None
    found = fused_loss_(model)(model(input_ids=IDS), IDS)
    torch.testing.assert_close(found, own)
    found.backward()
    torch.testing.assert_close(saved.weight.grad, expected)
    torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, own)
    table = weight_norm_(model)
    assert table.num_embeddings == WORDS
    torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, own)


def test_an_adapter_on_the_output_layer_is_named(transformers):
    model = _peft(build(transformers, "llama"), target_modules=["lm_head"])
    with pytest.raises(UnsupportedError, match=r"peft\.tuners\.lora.*modules_to_save"):
        fused_loss_(model)
