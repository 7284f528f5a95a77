"""``--fast-dropout``, of other masks."""

import copy

import pytest
import torch
from fairseq.modules import FairseqDropout

from tests.plugin.conftest import build_criterion, build_model, make_sample

DROPOUT = {"name": "regularized_cross_entropy", "fast_dropout": True}


def test_the_masks_are_of_the_seed_and_differ_from_fairseqs(task):
    model, sample = build_model(task, dropout=0.4).train(), make_sample(task)
    states = model.state_dict().keys()

    def loss(criterion):
        torch.manual_seed(5)
        return criterion(model, sample)[0].item()

    plain = loss(build_criterion(task, "regularized_cross_entropy"))
    criterion = build_criterion(task, **DROPOUT)
    first = loss(criterion)
    assert first == loss(criterion) and first != plain
    assert model.state_dict().keys() == states
    assert loss_of(copy.deepcopy(model).eval(), criterion, sample) == loss_of(
        model.eval(), build_criterion(task, "regularized_cross_entropy"), sample
    )
    dropouts = [one for one in model.modules() if isinstance(one, FairseqDropout)]
    assert dropouts and {type(one).__name__ for one in dropouts} == {"FastDropout"}


def loss_of(model, criterion, sample):
    return criterion(model, sample)[0].item()


def test_a_module_that_drops_in_inference_still_does(task):
    model = build_model(task, dropout=0.4).eval()
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            module.apply_during_inference = True
    criterion, sample = build_criterion(task, **DROPOUT), make_sample(task)
    assert loss_of(model, criterion, sample) != loss_of(model, criterion, sample)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_without_dropout_is_named(task, dropout, caplog):
    build_criterion(task, **DROPOUT).check_model(build_model(task, dropout=dropout))
    assert ("--fast-dropout has no effect" in caplog.text) == (dropout == 0)
