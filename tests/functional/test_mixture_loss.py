"""The log-mixture and its blockwise loss against the naive forms in float64."""

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional import blocks
from spectral_fairseq.functional.mixture_loss import (
    log_mixture,
    mix_scores,
    mixture_cross_entropy,
    mixture_of_contexts,
    posterior,
)
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    adversarial_margin,
    blockwise_cross_entropy,
)
from tests.capabilities import FLOAT16, HALF_ON_CPU, WATCHING
from tests.reference import mixture as reference

PAD = 1


def inputs(tokens=23, experts=3, dim=7, words=53, dtype=torch.float32, scale=1.0):
    torch.manual_seed(5)
    contexts = (scale * torch.randn(tokens, experts, dim).tanh()).to(dtype).requires_grad_()
    logits = (2 * torch.randn(tokens, experts)).to(dtype).requires_grad_()
    matrix = torch.randn(words, dim).to(dtype).requires_grad_()
    bias = torch.randn(words).to(dtype).requires_grad_()
    targets = torch.randint(2, words, (tokens,))
    targets[::5] = PAD
    return (contexts, logits, matrix, bias), targets


def naive(leaves, targets, smoothing):
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    contexts, logits, matrix, bias = leaves
    log_p = reference.log_mixture(contexts, logits.log_softmax(-1), matrix, bias)
    loss, nll = reference.smoothed_nll(log_p, targets, smoothing, PAD)
    loss.backward()
    return loss, nll, [leaf.grad for leaf in leaves]


def blockwise_loss(leaves, targets, smoothing, block=None):
    contexts, logits, matrix, bias = leaves
    prior = logits.float() if logits.dtype != torch.float64 else logits
    return mixture_cross_entropy(
        contexts,
        prior.log_softmax(-1),
        targets,
        matrix,
        bias,
        label_smoothing=smoothing,
        ignore_index=PAD,
        block_elements=block,
    )


def relative(found, expected):
    expected = expected.detach()
    return float((found.detach().double() - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("tokens,block", [(23, None), (23, 4 * 3 * 53), (2, None), (23, 1)])
def test_loss_equals_the_naive_form_in_float64(smoothing, experts, tokens, block):
    leaves, targets = inputs(tokens, experts)
    loss, _, nll, _ = blockwise_loss(leaves, targets, smoothing, block)
    (3 * loss).backward()
    expected_loss, expected_nll, gradients = naive(leaves, targets, smoothing)
    assert relative(loss, expected_loss) < 1e-6
    assert relative(nll, expected_nll) < 1e-6
    for leaf, gradient in zip(leaves, gradients):
        if gradient.norm() > 1e-9:  # one expert's prior has none
            assert relative(leaf.grad, 3 * gradient) < 1e-6
    assert leaves[0].grad[0].eq(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_loss_gradcheck(smoothing, scale):
    """At scale 300 words underflow in linear space, and log space takes over."""
    leaves, targets = inputs(5, 3, 3, 11, torch.float64)
    # eps is too small a step for scores of hundreds, so the scale is a constant of the function.

    def loss(contexts, *rest):
        return blockwise_loss((scale * contexts, *rest), targets, smoothing, 2 * 33)[0]

    assert torch.autograd.gradcheck(loss, leaves, atol=1e-4 if scale > 1 else 1e-5)


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("bound", [1, 8 * 1024 * 1024])
def test_log_mixture_and_its_gradients(monkeypatch, scale, bound):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", bound)
    leaves, _ = inputs(6, 4, 5, 31, torch.float64, scale)
    contexts, logits, matrix, bias = leaves
    shaped = contexts.view(2, 3, 4, 5)
    found = log_mixture(shaped, logits.view(2, 3, 4).log_softmax(-1), matrix, bias)
    doubles = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    expected = reference.log_mixture(doubles[0], doubles[1].log_softmax(-1), doubles[2], doubles[3])
    assert (expected.min() < -80) == (scale > 1)
    torch.testing.assert_close(found, expected.view(2, 3, 31))
    upstream = torch.randn(6, 31, dtype=torch.float64)
    (found.view(6, 31) * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for leaf, double in zip(leaves, doubles):
        torch.testing.assert_close(leaf.grad, double.grad)


def test_log_mixture_is_float32_and_normalised_from_half_precision():
    leaves, _ = inputs(dtype=torch.bfloat16)
    contexts, logits, matrix, bias = leaves
    found = log_mixture(contexts, logits.float().log_softmax(-1), matrix, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.log_softmax(-1), found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_scores_held_at_once_mix_alike(scale):
    leaves, _ = inputs(scale=scale)
    contexts, logits, matrix, bias = [leaf.detach() for leaf in leaves]
    prior = logits.log_softmax(-1)
    scores = torch.nn.functional.linear(contexts, matrix, bias)
    expected = reference.log_mixture(
        contexts.double(), prior.double(), matrix.double(), bias.double()
    )
    found = mix_scores(scores, prior)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_only_ignored_targets_give_zero_and_zero_gradients(smoothing):
    leaves, targets = inputs()
    loss, _, nll, _ = blockwise_loss(leaves, targets.fill_(PAD), smoothing)
    loss.backward()
    assert loss.item() == nll.item() == 0
    assert all(leaf.grad.eq(0).all() for leaf in leaves)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16])
def test_scores_of_ten_thousand_are_finite(dtype, smoothing):
    leaves, targets = inputs(dtype=dtype, scale=3e3)
    loss, *_ = blockwise_loss(leaves, targets, smoothing)
    loss.backward()
    expected, _, _ = naive(leaves, targets, smoothing)
    assert relative(loss, expected) < 1e-2
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gap", [50.0, 1e4])
def test_saturated_priors(smoothing, gap):
    """One expert takes all the mass; in float32 the others' prior is zero at 1e4."""
    leaves, targets = inputs()
    with torch.no_grad():
        leaves[1].zero_()
        leaves[1][:, 1] = gap
    loss, *_ = blockwise_loss(leaves, targets, smoothing)
    loss.backward()
    expected, _, gradients = naive(leaves, targets, smoothing)
    assert relative(loss, expected) < 1e-6
    for index in (0, 2, 3):
        assert relative(leaves[index].grad, gradients[index]) < 1e-6
    assert leaves[1].grad.abs().max() < 1e-6


@pytest.mark.parametrize(
    "dtype,limit", [(torch.bfloat16, 2e-2), pytest.param(torch.float16, 2e-3, marks=HALF_ON_CPU)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_precision_stays_near_float64(dtype, limit, smoothing):
    leaves, targets = inputs(dtype=dtype)
    loss, *_ = blockwise_loss(leaves, targets, smoothing)
    loss.backward()
    expected, _, gradients = naive(leaves, targets, smoothing)
    assert loss.dtype == torch.float32
    assert relative(loss, expected) < limit
    for leaf, gradient in zip(leaves, gradients):
        assert leaf.grad.dtype == dtype
        assert relative(leaf.grad, gradient) < limit


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast_takes_products_in_bfloat16_and_sums_in_float32(smoothing):
    leaves, targets = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, *_ = blockwise_loss(leaves, targets, smoothing)
    loss.backward()
    expected, _, gradients = naive(leaves, targets, smoothing)
    assert loss.dtype == torch.float32
    assert 1e-6 < relative(leaves[2].grad, gradients[2]) < 2e-2
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    assert relative(loss, expected) < 2e-3


@WATCHING
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_pass_holds_tokens_times_experts_times_words(smoothing):
    """The largest tensor that either pass allocates is a block, or as large as an input."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest[0] = max(largest[0], out.numel())
            return out

    leaves, targets = inputs(40, 3, 7, 53)
    block = 4 * 3 * 53
    with Watch():
        loss, *_ = blockwise_loss(leaves, targets, smoothing, block)
        loss.backward()
    assert largest[0] <= max(block, *(leaf.numel() for leaf in leaves))


def test_posterior_and_mixture_of_contexts():
    prior = torch.tensor([[0.25, 0.75]]).log()
    likelihood = torch.tensor([[0.6, 0.1]]).log()
    torch.testing.assert_close(posterior(prior, likelihood), torch.tensor([[2 / 3, 1 / 3]]))
    contexts = torch.tensor([[[4.0, 0.0], [0.0, 8.0]]])
    torch.testing.assert_close(mixture_of_contexts(contexts, prior), torch.tensor([[1.0, 6.0]]))


def test_a_prior_of_another_shape_is_refused():
    leaves, targets = inputs()
    with pytest.raises(ConfigurationError, match="`log_prior`"):
        mixture_cross_entropy(leaves[0], leaves[1][:, :2], targets, leaves[2])


EPSILON = 0.2


def naive_lowered(leaves, targets, epsilon, smoothing):
    """(loss, plain loss, plain NLL), and the gradients of the first."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    contexts, logits, matrix, bias = leaves
    log_prior = logits.log_softmax(-1)
    lowered = reference.adversarial_log_mixture(contexts, log_prior, targets, matrix, epsilon, bias)
    loss, _ = reference.smoothed_nll(lowered, targets, smoothing, PAD)
    plain = reference.log_mixture(contexts, log_prior, matrix, bias)
    gradients = torch.autograd.grad(loss, leaves)
    return (loss, *reference.smoothed_nll(plain, targets, smoothing, PAD)), gradients


def blockwise(leaves, targets, epsilon, smoothing, block=None):
    contexts, logits, matrix, bias = leaves
    prior = logits if logits.dtype == torch.float64 else logits.float()
    norms = row_norms(matrix[targets]).unsqueeze(1)  # [T, 1]
    return mixture_cross_entropy(
        contexts,
        prior.log_softmax(-1),
        targets,
        matrix,
        bias,
        margin=adversarial_margin(contexts, norms, targets.unsqueeze(1), epsilon),
        label_smoothing=smoothing,
        ignore_index=PAD,
        block_elements=block,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("experts,tokens,block", [(1, 23, None), (3, 23, 4 * 3 * 53), (3, 2, 1)])
def test_losses_and_gradients_equal_the_naive_form(smoothing, experts, tokens, block):
    leaves, targets = inputs(tokens, experts)
    found = blockwise(leaves, targets, EPSILON, smoothing, block)
    (3 * found.loss).backward()
    expected, gradients = naive_lowered(leaves, targets, EPSILON, smoothing)
    for fast, slow in zip(found, expected):
        assert relative(fast, slow) < 1e-6
    assert found.loss.item() > 1.05 * found.plain_loss.item()
    for leaf, gradient in zip(leaves, gradients):
        if gradient.norm() > 1e-9:  # one expert's prior has none
            assert relative(leaf.grad, 3 * gradient) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_gradcheck(smoothing, scale):
    """At scale 300 words underflow in linear space, and log space takes over."""
    leaves, targets = inputs(5, 3, 3, 11, torch.float64)

    def loss(contexts, *rest):
        return blockwise((scale * contexts, *rest), targets, EPSILON, smoothing, 2 * 33).loss

    assert torch.autograd.gradcheck(loss, leaves, atol=1e-4 if scale > 1 else 1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "dtype,limit",
    [(torch.bfloat16, 2e-2), pytest.param(torch.float16, 2e-3, marks=HALF_ON_CPU)],
)
def test_half_precision_of_lowered_scores_stays_near_float64(dtype, limit, smoothing):
    leaves, targets = inputs(dtype=dtype)
    found = blockwise(leaves, targets, EPSILON, smoothing)
    found.loss.backward()
    expected, gradients = naive_lowered(leaves, targets, EPSILON, smoothing)
    assert found.loss.dtype == torch.float32
    for fast, slow in zip(found, expected):
        assert relative(fast, slow) < limit
    for leaf, gradient in zip(leaves, gradients):
        assert leaf.grad.dtype == dtype
        assert relative(leaf.grad, gradient) < limit


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16])
def test_margins_of_thousands_are_finite(dtype, smoothing):
    """A target of probability one, whose lowered score is far below every other one."""
    leaves, targets = inputs(dtype=dtype, scale=3e3)
    found = blockwise(leaves, targets, 2.0, smoothing)
    found.loss.backward()
    expected, _ = naive_lowered(leaves, targets, 2.0, smoothing)
    for fast, slow in zip(found, expected):
        assert relative(fast, slow) < 1e-2
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_expert_is_a_single_softmax(smoothing):
    """The blockwise softmax, whose label smoothing takes no pass over the scores, agrees."""
    leaves, targets = inputs(experts=1, dtype=torch.float64)
    mixed = blockwise(leaves, targets, EPSILON, smoothing, 4 * 53)
    expected = torch.autograd.grad(mixed.loss, [leaves[0], *leaves[2:]])
    contexts, _, matrix, bias = leaves
    single = blockwise_cross_entropy(
        contexts.squeeze(1),
        targets,
        matrix,
        bias,
        margin=adversarial_margin(
            contexts.squeeze(1), row_norms(matrix[targets]), targets, EPSILON
        ),
        label_smoothing=smoothing,
        ignore_index=PAD,
        block_elements=4 * 53,
    )
    torch.testing.assert_close(tuple(single), tuple(mixed))
    torch.testing.assert_close(torch.autograd.grad(single.loss, [leaves[0], *leaves[2:]]), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_evaluation_without_gradients_and_batches_of_padding(smoothing):
    leaves, targets = inputs()
    with torch.no_grad():
        found = blockwise(leaves, targets, EPSILON, smoothing)
    expected, _ = naive_lowered(leaves, targets, EPSILON, smoothing)
    assert relative(found.loss, expected[0]) < 1e-6
    empty = blockwise(leaves, targets.fill_(PAD), EPSILON, smoothing)
    empty.loss.backward()
    assert all(part.item() == 0 for part in empty)
    assert all(leaf.grad.eq(0).all() for leaf in leaves)
