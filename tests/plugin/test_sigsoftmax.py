"""The sigsoftmax head inside fairseq's models and this package's criterions."""

import pytest
import torch

from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.errors import ConfigurationError
from tests.plugin.conftest import build_criterion, build_model, make_sample

NOTHING = {"spectrum_weight": 0.0, "orthogonality_weights": "0,0,0,0"}


def sigsoftmax(task, **options):
    return build_model(task, output_head="sigsoftmax", **options)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("embedding_type", [kind.kind for kind in TABLES])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_own_loss_equals_the_plain_criterions(task, embedding_type, label_smoothing):
    model = sigsoftmax(task, embedding_type=embedding_type).double().train()
    sample, options = make_sample(task), {"label_smoothing": label_smoothing}
    ours = build_criterion(task, **NOTHING, **options)(model, sample)
    plain = build_criterion(task, "label_smoothed_cross_entropy", **options)(model, sample)
    torch.testing.assert_close(ours[0].double(), plain[0].double(), rtol=1e-6, atol=1e-6)
    first, second = gradients(model, ours[0]), gradients(model, plain[0])
    assert first.keys() == second.keys()
    for name in second:
        torch.testing.assert_close(first[name], second[name], rtol=1e-6, atol=1e-6)


def test_probabilities_have_a_higher_rank_than_a_softmax(task):
    heads = (sigsoftmax(task), build_model(task))
    torch.manual_seed(0)
    features = torch.randn(64, heads[0].decoder.output_embed_dim)
    ranks = []
    for model in heads:
        head = model.decoder.output_projection.double()
        torch.nn.init.normal_(head.table.sigma)
        log_p = head(features.double()).log_softmax(-1)
        ranks.append(int(torch.linalg.matrix_rank(log_p)))
    dim = features.size(1)
    assert ranks[1] <= dim + 1 < ranks[0]


def test_it_can_be_scripted_and_composes_with_simcut(task):
    model, sample = sigsoftmax(task), make_sample(task)
    torch.jit.script(model.decoder.output_projection)
    loss, _, log = build_criterion(task, simcut_weight=3.0, **NOTHING)(model.train(), sample)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("flag", ["adversarial_epsilon", "gradient_gating"])
def test_methods_for_linear_scores_refuse_it(task, flag):
    criterion = build_criterion(task, **NOTHING, **{flag: 0.1})
    with pytest.raises(ConfigurationError, match="SigSoftmaxHead"):
        criterion.check_model(sigsoftmax(task))
