import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.functional.float32_products import (
    LONG,
    LONG_WITH_AMX,
    choose_attention,
    has_amx,
    has_flash_kernel,
)

if not has_flash_kernel():
    pytest.skip("this torch has no flash attention for CPUs", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("products_as_torch_comes")

MATMUL = getattr(torch.backends.mkldnn, "matmul", None)
if not hasattr(MATMUL, "fp32_precision"):
    MATMUL = None


@pytest.fixture
def chosen(products_as_torch_comes):
    """Attention by length beside products of oneDNN."""
    original = F.scaled_dot_product_attention
    if MATMUL is not None:
        before, MATMUL.fp32_precision = MATMUL.fp32_precision, "bf16"
    restore = choose_attention(MATMUL)
    assert F.scaled_dot_product_attention is not original
    yield original
    if MATMUL is not None:
        assert MATMUL.fp32_precision == "bf16"  # as it was before each attention
        MATMUL.fp32_precision = before
    restore()
    assert F.scaled_dot_product_attention is original and torch.backends.cuda.flash_sdp_enabled()


def run(attention, length, dtype, **options):
    """Output and the gradients of query, key and value."""
    generator = torch.Generator().manual_seed(1)
    size = (2, 3, length, 16)
    inputs = [torch.randn(size, generator=generator).to(dtype) for _ in range(3)]
    for each in inputs:
        each.requires_grad_()
    found = attention(*inputs, **options)
    found.backward(torch.randn(size, generator=generator).to(dtype))
    return [found.detach(), *(each.grad for each in inputs)]


MASK = torch.zeros(2, 1, 1, 2 * LONG)
MASK[1, ..., -9:] = -torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [LONG // 4, LONG, 2 * LONG])
@pytest.mark.parametrize("kind", ["all", "causal", "mask", "bool"])
def test_every_form_is_the_same_attention(chosen, kind, length, dtype):
    mask = MASK[..., -length:]
    options = {
        "all": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": mask.to(dtype)},
        "bool": {"attn_mask": mask == 0},
    }[kind]
    ours = run(F.scaled_dot_product_attention, length, dtype, **options)
    if kind == "mask":
        options = {"attn_mask": mask.double()}
    exact = run(chosen, length, torch.float64, **options)
    for found, reference in zip(ours, exact):
        assert found.dtype == dtype
        # With AMX, oneDNN rounds the factors of float32 products too, where it may.
        rounds = dtype == torch.bfloat16 or (has_amx() and length < LONG)
        bound = 0.05 if rounds else 1e-5
        torch.testing.assert_close(found.double(), reference, rtol=bound, atol=bound)


def test_long_sequences_take_the_flash_kernel_with_mkl(chosen, monkeypatch):
    from spectral_fairseq.functional import float32_products

    entered = []
    enter = float32_products._WithMKL.__enter__
    monkeypatch.setattr(
        float32_products._WithMKL, "__enter__", lambda self: (entered.append(1), enter(self))[1]
    )
    run(F.scaled_dot_product_attention, LONG - 1, torch.float32)
    run(F.scaled_dot_product_attention, LONG, torch.float32, dropout_p=0.1)
    assert not entered
    run(F.scaled_dot_product_attention, LONG, torch.float32)
    assert len(entered) == (1 if MATMUL is None else 2)  # the backward pass as well
    assert not torch.backends.cuda.flash_sdp_enabled()


def test_another_choice_inside_changes_nothing(chosen):
    attention = F.scaled_dot_product_attention
    choose_attention(MATMUL)()
    assert F.scaled_dot_product_attention is attention


@pytest.fixture
def with_amx(products_as_torch_comes):
    """Attention by length on a processor with AMX, beside products as torch comes."""
    original = F.scaled_dot_product_attention
    restore = choose_attention(None, amx=True)
    assert torch.backends.cuda.flash_sdp_enabled()  # float32 and long sequences keep it
    yield original
    assert torch.backends.cuda.flash_sdp_enabled()
    restore()
    assert F.scaled_dot_product_attention is original and torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_with_amx_short_halves_are_computed_in_float32(with_amx, options):
    found = run(F.scaled_dot_product_attention, LONG, torch.bfloat16, **options)
    exact = run(with_amx, LONG, torch.float64, **options)
    rounded = run(with_amx, LONG, torch.bfloat16, **options)
    for half, reference, torchs in zip(found, exact, rounded):
        assert half.dtype == torch.bfloat16
        assert (half - reference).norm() <= (torchs - reference).norm()
        torch.testing.assert_close(half.double(), reference, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "length, dtype", [(LONG_WITH_AMX, torch.bfloat16), (LONG, torch.float32), (8, torch.float64)]
)
def test_with_amx_all_others_are_torchs(with_amx, length, dtype):
    ours = run(F.scaled_dot_product_attention, length, dtype)
    for found, reference in zip(ours, run(with_amx, length, dtype)):
        assert torch.equal(found, reference)
