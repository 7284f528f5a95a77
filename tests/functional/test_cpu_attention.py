import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.functional.cpu_attention import LONG, choose_attention, has_flash_kernel

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
        rounded = [1e-5, 0.05][dtype == torch.bfloat16]
        torch.testing.assert_close(found.double(), reference, rtol=rounded, atol=rounded)


def test_long_sequences_take_the_flash_kernel_with_mkl(chosen, monkeypatch):
    from spectral_fairseq.functional import cpu_attention

    entered = []
    enter = cpu_attention._WithMKL.__enter__
    monkeypatch.setattr(
        cpu_attention._WithMKL, "__enter__", lambda self: (entered.append(1), enter(self))[1]
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
