"""The z-loss and the soft cap in the loss by blocks."""

import itertools
import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.capabilities import HALF_ON_CPU
from tests.functional.test_softmax_loss import PAD, inputs, relative
from tests.reference import z_loss as reference


@pytest.mark.parametrize("block", [None, 53 * 4, 1])
@pytest.mark.parametrize(
    "z_loss,softcap,smoothing", itertools.product([0.0, 0.02], [None, 1.5], [0.0, 0.1])
)
def test_equals_the_naive_form_in_float64(z_loss, softcap, smoothing, block):
    contexts, targets, matrix, bias = inputs(23)
    given = {"z_loss": z_loss, "softcap": softcap, "label_smoothing": smoothing}
    found = blockwise_cross_entropy(
        contexts, targets, matrix, bias, ignore_index=PAD, block_elements=block, **given
    )
    (3 * found.loss).backward()
    leaves = [one.detach().double().requires_grad_() for one in (contexts, matrix, bias)]
    scores = leaves[0] @ leaves[1].t() + leaves[2]
    expected = reference.losses(scores, targets, ignore_index=PAD, **given)
    (3 * expected[0]).backward()
    for one, other in zip(found[: 3 + bool(z_loss)], expected):
        assert relative(one, other) < 1e-6
    assert z_loss or not found.squares
    for leaf, other in zip((contexts, matrix, bias), leaves):
        assert relative(leaf.grad, other.grad) < 1e-6
    assert contexts.grad[0].eq(0).all()
    assert [one.requires_grad for one in found] == [True, False, False, False]


@pytest.mark.parametrize("z_loss,softcap", [(0.1, None), (0.0, 2.0), (0.1, 2.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(z_loss, softcap, smoothing):
    contexts, targets, matrix, bias = inputs(5, 3, 11, torch.float64)

    def loss(contexts, matrix, bias):
        return blockwise_cross_entropy(
            contexts,
            targets,
            matrix,
            bias,
            z_loss=z_loss,
            softcap=softcap,
            label_smoothing=smoothing,
            ignore_index=PAD,
            block_elements=22,
        ).loss

    assert torch.autograd.gradcheck(loss, (contexts, matrix, bias))


def test_values_known_from_outside():
    """Scores are given as rows of the contexts beside a table that is the identity."""
    scores = torch.tensor([[2.0, 0, -1, 0.5], [0, 0, 0, 0]], dtype=torch.double).requires_grad_()
    table = torch.eye(4, dtype=torch.double)
    loss = blockwise_cross_entropy(scores, torch.tensor([0, 3]), table, z_loss=1e-4).loss / 2
    loss.backward()
    assert loss.item() == pytest.approx(0.8646923924359461, rel=1e-14)
    first = [-0.14478370833, 0.04807329744, 0.01768517780, 0.07925946805]
    assert scores.grad[0].tolist() == pytest.approx(first, rel=1e-9)

    scores = torch.tensor([[40.0, -20, 10]], dtype=torch.double).requires_grad_()
    table = torch.eye(3, dtype=torch.double)
    loss = blockwise_cross_entropy(scores, torch.tensor([2]), table, softcap=30.0).loss
    loss.backward()
    assert loss.item() == pytest.approx(16.4564677976, rel=1e-10)
    assert scores.grad[0].tolist() == pytest.approx(
        [0.24299268744, 7.7788e-20, -0.89662949568], rel=1e-4
    )


def test_without_either_the_plain_loss_is_the_loss():
    contexts, targets, matrix, bias = inputs()
    options = {"label_smoothing": 0.1, "ignore_index": PAD}
    found = blockwise_cross_entropy(contexts, targets, matrix, bias, **options)
    assert torch.equal(found.plain_loss, found.loss) and not found.squares


def test_only_ignored_targets_give_zero_and_zero_gradients():
    contexts, targets, matrix, bias = inputs()
    targets.fill_(PAD)
    found = blockwise_cross_entropy(
        contexts, targets, matrix, bias, z_loss=0.1, softcap=3.0, ignore_index=PAD
    )
    found.loss.backward()
    assert not any(one.item() for one in found)
    assert not any(leaf.grad.any() for leaf in (contexts, matrix, bias))


@pytest.mark.parametrize(
    "dtype,limit", [(torch.bfloat16, 2e-2), pytest.param(torch.float16, 2e-3, marks=HALF_ON_CPU)]
)
@pytest.mark.parametrize("z_loss,softcap", [(0.5, None), (0.5, 3.0), (0.0, 3.0)])
def test_half_precision_stays_near_float64(dtype, limit, z_loss, softcap):
    contexts, targets, matrix, bias = inputs(dtype=dtype)
    given = {"z_loss": z_loss, "softcap": softcap, "label_smoothing": 0.1, "ignore_index": PAD}
    found = blockwise_cross_entropy(contexts, targets, matrix, bias, **given)
    found.loss.backward()
    leaves = [one.detach().double().requires_grad_() for one in (contexts, matrix, bias)]
    expected, *_ = reference.losses(leaves[0] @ leaves[1].t() + leaves[2], targets, **given)
    expected.backward()
    assert relative(found.loss, expected) < limit
    for leaf, other in zip((contexts, matrix, bias), leaves):
        assert relative(leaf.grad, other.grad) < 2 * limit


def test_scores_far_beyond_the_cap_are_finite():
    contexts, targets, matrix, bias = inputs(scale=1e4)
    found = blockwise_cross_entropy(contexts, targets, matrix, bias, z_loss=1e-4, softcap=30.0)
    found.loss.backward()
    assert all(one.isfinite() for one in found)
    assert all(leaf.grad.isfinite().all() for leaf in (contexts, matrix, bias))
    assert float(found.nll) <= len(targets) * (60 + math.log(len(matrix)))


def test_options_outside_their_ranges_are_refused():
    contexts, targets, matrix, bias = inputs()
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="`z_loss`"):
            blockwise_cross_entropy(contexts, targets, matrix, bias, z_loss=wrong)
    for wrong in (-1.0, 0.0, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="`softcap`"):
            blockwise_cross_entropy(contexts, targets, matrix, bias, softcap=wrong)
