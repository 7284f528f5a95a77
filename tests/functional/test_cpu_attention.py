from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from spectral_fairseq.functional.cpu_attention import (
    LONG,
    LONG_WITH_AMX,
    attention_weights,
    choose_attention,
    has_flash_kernel,
)
from spectral_fairseq.functional.float32_products import Products, using_products
from spectral_fairseq.functional.processor import has_amx
from spectral_fairseq.functional.settings import FLASH

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
    restore = choose_attention()
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


@pytest.mark.parametrize("length", [LONG // 4, LONG, 2 * LONG])
def test_under_autocast_the_types_are_those_of_torch(chosen, length):
    """Layers that normalise queries and keys leave them, or one of them, in float32."""
    query, key, value = (torch.randn(2, 4, length, 8) for _ in range(3))
    for types in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        given = [query.detach().to(types[0]).requires_grad_(), key.to(types[1]), value]
        with torch.autocast("cpu", torch.bfloat16):
            expected = chosen(*given)
            found = F.scaled_dot_product_attention(*given)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        found.sum().backward()
        assert given[0].grad.isfinite().all()


def test_long_sequences_take_the_flash_kernel_with_mkl(chosen, monkeypatch):
    entered, enter = [], FLASH.enter
    monkeypatch.setattr(FLASH, "enter", lambda: (entered.append(1), enter())[1])
    run(F.scaled_dot_product_attention, LONG - 1, torch.float32)
    run(F.scaled_dot_product_attention, LONG, torch.float32, dropout_p=0.1)
    assert not entered
    run(F.scaled_dot_product_attention, LONG, torch.float32)
    assert len(entered) == (1 if MATMUL is None else 2)  # the backward pass as well
    assert not torch.backends.cuda.flash_sdp_enabled()


def settings():
    precision = None if MATMUL is None else MATMUL.fp32_precision
    return torch.backends.cuda.flash_sdp_enabled(), precision


def test_a_backward_pass_after_everything_has_ended_changes_nothing():
    before = settings()
    query = torch.randn(1, 2, 2 * LONG, 16, requires_grad=True)
    with using_products(Products(True, "")):
        total = F.scaled_dot_product_attention(query, query, query).sum()
    assert settings() == before
    total.backward()
    assert settings() == before and query.grad is not None


def test_threads_leave_the_settings_as_they_were(chosen):
    """Each is in its attention while the others enter theirs, or leave it."""
    before, together = settings(), Barrier(4)
    query = torch.randn(1, 2, 2 * LONG, 16)

    class Waiting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is chosen:
                together.wait(timeout=60)
            return function(*args, **(kwargs or {}))

    def attend(_):
        with Waiting():
            return F.scaled_dot_product_attention(query, query, query)

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(attend, range(4))
    assert all(torch.equal(one, first) for one in others)
    assert settings() == before


def test_what_ends_while_another_thread_attends_is_put_back():
    before, inside, ended = settings(), Event(), Event()
    query = torch.randn(1, 2, 2 * LONG, 16)

    class Waiting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == "scaled_dot_product_attention":
                inside.set()
                ended.wait(timeout=60)
            return function(*args, **(kwargs or {}))

    def attend():
        with Waiting():
            return F.scaled_dot_product_attention(query, query, query)

    with ThreadPoolExecutor(1) as thread:
        with using_products(Products(True, "")):
            found = thread.submit(attend)
            assert inside.wait(timeout=60)
        ended.set()
        found.result()
    assert settings() == before


def test_torchscript_compiles_attention(chosen):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    features = torch.randn(2, 5, 8)
    torch.testing.assert_close(torch.jit.script(layer)(features), layer(features))


def nested(attention):
    each = [torch.randn(length, 2, 8) for length in (3, 5)]
    heads = torch.nested.nested_tensor(each, layout=torch.jagged).transpose(1, 2)
    return attention(heads, heads, heads).values()


def mapped(attention):
    batch = torch.randn(3, 2, 4, 8, dtype=torch.bfloat16)
    return torch.func.vmap(lambda one: attention(one, one, one))(batch)


@pytest.mark.parametrize("use", [nested, mapped])
def test_what_torch_takes_is_taken(chosen, use):
    """A nested tensor has no length, and what is mapped knows no function of ours."""
    if not hasattr(torch, "jagged"):
        pytest.skip("this torch has no jagged tensors")
    torch.manual_seed(1)
    bare = use(chosen)
    torch.manual_seed(1)
    torch.testing.assert_close(use(F.scaled_dot_product_attention), bare, rtol=1e-2, atol=1e-2)


def test_another_choice_inside_changes_nothing(chosen):
    attention = F.scaled_dot_product_attention
    choose_attention()()
    assert F.scaled_dot_product_attention is attention


@pytest.fixture
def with_amx(products_as_torch_comes):
    """Attention by length on a processor with AMX, beside products as torch comes."""
    original = F.scaled_dot_product_attention
    restore = choose_attention(amx=True)
    assert torch.backends.cuda.flash_sdp_enabled()  # float32 and long sequences keep it
    yield original
    assert torch.backends.cuda.flash_sdp_enabled()
    restore()
    assert F.scaled_dot_product_attention is original and torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("length", [LONG // 4, LONG_WITH_AMX - 1])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}])
def test_with_amx_short_halves_are_about_as_precise_as_in_the_kernel(with_amx, options, length):
    ours = run(F.scaled_dot_product_attention, length, torch.bfloat16, **options)
    exact = run(with_amx, length, torch.float64, **options)
    kernels = run(with_amx, length, torch.bfloat16, **options)
    for found, reference, kernel in zip(ours, exact, kernels):
        assert found.dtype == torch.bfloat16
        assert (found - reference).norm() <= 1.6 * (kernel - reference).norm()
        assert not torch.equal(found, kernel)


class Factors(TorchDispatchMode):
    """Takes note of the factors of batched products."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "bmm":
            self.found += args[:2]
        return func(*args, **(kwargs or {}))


def test_no_product_of_short_halves_copies_a_factor(chosen):
    """The heads of a projection lie beside each other, and six products read them."""
    heads = [
        torch.randn(8, 2 * 4, 16).bfloat16().transpose(0, 1).unflatten(0, (2, 4)).requires_grad_()
        for _ in range(3)
    ]
    with Factors() as batched:
        output = F.scaled_dot_product_attention(*heads)
        output.backward(torch.ones_like(output))
    assert len(batched.found) == 12
    as_they_are = [one.is_contiguous() or one.mT.is_contiguous() for one in batched.found]
    assert all(as_they_are)


def test_dropout_falls_on_the_weights(with_amx):
    query, key = torch.randn(2, 2, 3, 8, 16).bfloat16().unbind()
    torch.manual_seed(1)
    # With values of one the output is the sum of the weights that are kept.
    found = F.scaled_dot_product_attention(query, key, torch.ones_like(key), dropout_p=0.5)
    torch.manual_seed(1)
    kept = F.dropout(attention_weights(query, key), 0.5)
    assert 0.3 < (kept == 0).float().mean() < 0.7
    torch.testing.assert_close(found[..., 0].float(), kept.float().sum(-1), rtol=0.01, atol=0.01)


def test_heads_that_share_keys_and_a_mask_that_learns_are_torchs(with_amx):
    query, key = torch.randn(2, 4, 8, 16).bfloat16(), torch.randn(2, 2, 8, 16).bfloat16()
    if "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or ""):
        shared = {"enable_gqa": True}
        ours = F.scaled_dot_product_attention(query, key, key, **shared)
        assert torch.equal(ours, with_amx(query, key, key, **shared))
    mask = torch.zeros(8, 8, dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(query, query, query, mask).sum().backward()
    assert mask.grad is not None


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_a_query_that_sees_no_key_has_the_weights_zero(dtype):
    query, key = (torch.randn(2, 3, 4, 8).bfloat16().requires_grad_() for _ in range(2))
    seen = torch.tensor([True, True, False, True])
    mask = seen[:, None].expand(4, 4) if dtype == torch.bool else torch.zeros(4, 4)
    if dtype != torch.bool:
        mask = mask.masked_fill(~seen[:, None], -torch.inf).to(dtype)
    weights = attention_weights(query, key, mask)
    weights.square().sum().backward()
    sums = weights.float().sum(-1)
    torch.testing.assert_close(sums, seen.float().expand_as(sums), rtol=0.01, atol=0.01)
    assert query.grad[..., 2, :].eq(0).all() and query.grad[..., 0, :].ne(0).any()
    assert key.grad.isfinite().all()


@pytest.mark.parametrize("mask", [None, torch.ones(4, 6).tril().bool(), -torch.rand(2, 1, 6)])
def test_the_weights_are_those_of_a_softmax_with_both_derivatives(mask):
    query, key = torch.randn(2, 4, 3).double(), torch.randn(2, 6, 3).double()
    inputs = (query.requires_grad_(), key.requires_grad_())
    scores = query @ key.transpose(1, 2) / 3**0.5
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    torch.testing.assert_close(attention_weights(*inputs, mask), scores.softmax(-1))
    assert torch.autograd.gradcheck(lambda q, k: attention_weights(q, k, mask), inputs)
    assert torch.autograd.gradgradcheck(lambda q, k: attention_weights(q, k, mask), inputs)


def test_scores_stay_in_float32_under_autocast():
    query, key = torch.randn(2, 2, 3, 40, 16).mul(3).bfloat16().unbind()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_weights(query, key)
    assert torch.equal(found, attention_weights(query, key))


@pytest.mark.parametrize(
    "length, dtype", [(LONG_WITH_AMX, torch.bfloat16), (LONG, torch.float32), (8, torch.float64)]
)
def test_with_amx_all_others_are_torchs(with_amx, length, dtype):
    ours = run(F.scaled_dot_product_attention, length, dtype)
    for found, reference in zip(ours, run(with_amx, length, dtype)):
        assert torch.equal(found, reference)
