"""Relative attention: parity with its naive form, gradients, dropout and dtypes."""

import pytest
import torch

from spectral_fairseq.lm import relative_attention
from spectral_fairseq.lm.relative_attention import (
    Relative,
    RelativeAttention,
    masked_keys,
    sinusoids,
)
from tests.reference import relative_attention as reference


@pytest.fixture(params=["fused", "products"])
def kernel(request, monkeypatch):
    """Both forms of the same attention; torch before 2.0 has one."""
    if request.param == "products":
        monkeypatch.setattr(relative_attention, "_FUSED", None)
    elif relative_attention._FUSED is None:
        pytest.skip("this torch has no fused attention")


def attention(dim=6, heads=2, head_dim=5, **options):
    torch.manual_seed(2)
    return RelativeAttention(dim, heads, head_dim, **options).double()


def relative_of(module, queries, keys, dim, *, clamp=None, reach=None):
    torch.manual_seed(4)
    distances = torch.arange(keys - 1, -1, -1, dtype=torch.float64)
    distances = distances if clamp is None else distances.clamp(max=clamp)
    u, v = (torch.randn(module.heads, module.head_dim, dtype=torch.float64) for _ in "uv")
    return Relative(sinusoids(distances, dim), u, v, masked_keys(queries, keys, reach))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("clamp, reach", [(None, None), (2, None), (None, 3), (1, 4)])
@pytest.mark.parametrize("queries, keys, dim", [(1, 1, 6), (1, 6, 6), (5, 5, 7), (3, 8, 6)])
def test_equals_the_naive_form(queries, keys, dim, clamp, reach):
    module = attention(dim)
    torch.manual_seed(9)
    context = torch.randn(2, keys, dim, dtype=torch.float64)
    relative = relative_of(module, queries, keys, dim, clamp=clamp, reach=reach)
    x = context[:, keys - queries :]
    found = module(x, module.keys_values(context), relative)
    for b in range(2):
        expected = reference.attention(
            module,
            x[b],
            context[b],
            relative.content_bias,
            relative.position_bias,
            clamp=clamp or 0,
            reach=reach,
        )
        torch.testing.assert_close(found[b], expected)


@pytest.mark.usefixtures("kernel")
def test_gradcheck():
    module = attention(dim=4, heads=2, head_dim=3)
    relative = relative_of(module, 2, 3, 4)
    context = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    u, v = (
        bias.clone().requires_grad_() for bias in (relative.content_bias, relative.position_bias)
    )
    weights = tuple(module.parameters())

    def run(context, u, v, *_):
        both = relative._replace(content_bias=u, position_bias=v)
        return module(context[:, 1:], module.keys_values(context), both)

    assert torch.autograd.gradcheck(run, (context, u, v, *weights))


@pytest.mark.usefixtures("kernel")
def test_attention_dropout_only_in_training():
    module = attention(dropout=0.5)
    relative = relative_of(module, 5, 5, 6)
    x = torch.randn(1, 5, 6, dtype=torch.float64)
    context = module.keys_values(x)
    kept = module.eval()(x, context, relative)
    assert torch.equal(kept, module(x, context, relative))
    assert not torch.allclose(kept, module.train()(x, context, relative))


@pytest.mark.usefixtures("kernel")
def test_half_precision_keeps_its_dtype():
    module = attention().to(torch.bfloat16)
    relative = relative_of(module, 3, 5, 6)
    lean = Relative(*(t.to(torch.bfloat16) for t in relative[:3]), relative.masked)
    context = torch.randn(2, 5, 6).to(torch.bfloat16)
    found = module(context[:, 2:], module.keys_values(context), lean)
    assert found.dtype == torch.bfloat16 and torch.isfinite(found).all()
