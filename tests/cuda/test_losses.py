"""The losses on the virtual device: values of the CPU, and at most two waits."""

import pytest
import torch

from spectral_fairseq.functional import blocks as block_scores
from spectral_fairseq.functional.adaptive_loss import adaptive_cross_entropy
from spectral_fairseq.functional.blocks import (
    BLOCK_ELEMENTS,
    CUDA_BLOCK_ELEMENTS,
    aligned,
    elements_for,
)
from spectral_fairseq.functional.consistency_loss import consistency_cross_entropy
from spectral_fairseq.functional.mixture_loss import log_mixture
from spectral_fairseq.functional.products import has_wide_products
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.functional import losses

virtual = pytest.importorskip(
    "tests.cuda.virtual_cuda", reason="needs torch 2.2", exc_type=ImportError
)

WORDS, DIM, TOKENS, EXPERTS = 61, 8, 24, 3


def _adaptive(leaves, targets, eps, block):
    h, q, w, _ = leaves
    given = (h[:, 0], q, targets, w, None, (9, 20, 40))
    return (adaptive_cross_entropy(*given, block_elements=3 * block * WORDS),)


def _consistency(leaves, targets, eps, block):
    h, _, w, _ = leaves
    given = {"weight": 1.0, "block_elements": 3 * block * WORDS}
    return (consistency_cross_entropy(h[:, :2], targets, w, **given).loss,)


def _log_mixture(leaves, targets, eps, block):
    h, q, w, _ = leaves
    return (-log_mixture(h, losses.prior(q), w).gather(1, targets[:, None]).sum(),)


# name -> (loss, label smoothing)
LOSSES = {
    "softmax": (losses.LOSSES["softmax"].fast, 0.1),
    "z-loss": (losses.LOSSES["softmax with both"].fast, 0.1),
    "adaptive": (_adaptive, 0.0),
    "consistency": (_consistency, 0.0),
    "mixture": (losses.LOSSES["mixture"].fast, 0.0),
    "mixture, smoothed": (losses.LOSSES["mixture"].fast, 0.1),
    "log-mixture": (_log_mixture, 0.0),
}


def leaves_of(dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, EXPERTS, DIM), (TOKENS, EXPERTS), (WORDS, DIM))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    targets = torch.randint(2, WORDS, (TOKENS,), generator=generator)
    targets[::7] = losses.PAD
    return [drawn[0] * scale, drawn[1].float(), drawn[2]], targets


def run(name, leaves, targets, block):
    """Loss and gradients; a block has so many tokens."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    loss, smoothing = LOSSES[name]
    found = loss([*leaves, None], targets, smoothing, block)[0]
    found.backward()
    return found.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def on_device(name, leaves, targets, block):
    """The same on the virtual device: loss, gradients and waits of its second call."""
    with virtual.virtual_cuda() as log:
        leaves, targets = [leaf.cuda() for leaf in leaves], targets.cuda()
        run(name, leaves, targets, block)
        log.events.clear()
        loss, gradients = run(name, leaves, targets, block)
        waits = sum(log.waits().values())
        return loss.cpu(), [gradient.cpu() for gradient in gradients], waits


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_waits_at_any_number_of_blocks(name, scale):
    """At scale 60 words underflow in linear space, and log space takes over once for all."""
    leaves, targets = leaves_of(scale=scale)
    expected = run(name, leaves, targets, TOKENS)
    for blocks in (1, 6):
        *found, waits = on_device(name, leaves, targets, TOKENS // blocks)
        torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=1e-4)
        torch.testing.assert_close(found[1], expected[1], rtol=2e-4, atol=2e-5 * scale)
        assert waits <= 2


@pytest.mark.parametrize("dtype, limit", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_multiplies_in_half_and_stays_near_float64(name, dtype, limit):
    leaves, targets = leaves_of(dtype)
    expected = run(name, [leaf.double() for leaf in leaves], targets, TOKENS)
    loss, gradients, waits = on_device(name, leaves, targets, 4)
    torch.testing.assert_close(loss.double(), expected[0], rtol=limit, atol=limit)
    for found, wanted in zip(gradients, expected[1]):
        assert (found.double() - wanted).norm() <= limit * wanted.norm()
    assert waits <= 2


def test_small_probabilities_survive_float16_products():
    """Each of 60,000 equal words has a probability that float16 holds with few digits."""
    table = torch.zeros(60_000, 8, dtype=torch.float16)
    with virtual.virtual_cuda():
        if not has_wide_products(torch.float16, torch.device("cuda", 0)):
            pytest.skip("this torch rounds products of float16, which then are float32 products")
        contexts = torch.ones(2, 8, dtype=torch.float16).cuda()
        table = table.cuda().requires_grad_()
        targets = torch.tensor([3, 4]).cuda()
        loss, *_ = blockwise_cross_entropy(contexts, targets, table)
        (1024 * loss).backward()
        gradient = table.grad[10:].float().cpu()
    torch.testing.assert_close(
        gradient, torch.full_like(gradient, 2048 / 60_000), rtol=1e-3, atol=0
    )


def test_blocks_grow_with_free_memory():
    device = torch.device("cuda", 0)
    sizes = []
    for free in (0, 2**30, 2**32, 2**36):
        with virtual.virtual_cuda(free_bytes=free):
            sizes.append(elements_for(device))
    assert sizes == [BLOCK_ELEMENTS, 2**25, CUDA_BLOCK_ELEMENTS, CUDA_BLOCK_ELEMENTS]
    assert elements_for(torch.device("cpu")) == BLOCK_ELEMENTS


@pytest.mark.parametrize("name", LOSSES)
def test_columns_of_zeros_change_neither_loss_nor_gradients(name, monkeypatch):
    leaves, targets = leaves_of(torch.float64)
    leaves = [leaves[0][..., :5], leaves[1], leaves[2][:, :5]]
    expected = run(name, leaves, targets, TOKENS)
    monkeypatch.setattr(block_scores, "_wants_alignment", lambda *_: True)
    torch.testing.assert_close(run(name, leaves, targets, TOKENS), expected)


def test_only_products_of_16_bit_numbers_on_a_gpu_are_aligned():
    def width(dtype, device, dim):
        contexts, matrix = (torch.ones(3, dim, dtype=dtype, device=device) for _ in range(2))
        return [one.size(1) for one in aligned(contexts, matrix)]

    assert width(torch.bfloat16, "cpu", 410) == [410, 410]
    with virtual.virtual_cuda():
        assert width(torch.bfloat16, "cuda", 410) == [416, 416]
        # Where torch rounds its products to float16, they are float32 products.
        wide = has_wide_products(torch.float16, torch.device("cuda", 0))
        assert width(torch.float16, "cuda", 410) == ([416, 416] if wide else [410, 410])
        assert width(torch.bfloat16, "cuda", 512) == [512, 512]
        assert width(torch.float32, "cuda", 410) == [410, 410]
