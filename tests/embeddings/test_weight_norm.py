import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.embeddings.weight_norm import WeightNormEmbedding, gradient_scale
from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.word_counts import smoothed_log_counts
from tests.capabilities import FLOAT16
from tests.embeddings.test_tables import COUNTS, FILLERS, PAD, dense
from tests.reference import row_penalties as reference


def table(n=37, d=5, counts=COUNTS, **options):
    torch.manual_seed(0)
    return WeightNormEmbedding(n, d, PAD, FILLERS, counts=counts, **options)


def others(weight):
    return weight[[k for k in range(weight.size(0)) if k != PAD]]


def test_starts_with_norms_in_proportion_to_log_counts():
    module = table(sigma=0.7, init_range=0.2)
    expected = 0.7 * smoothed_log_counts(COUNTS)
    expected[PAD] = 0
    torch.testing.assert_close(module.weight.norm(dim=1), expected)
    torch.testing.assert_close(module.norms(), expected)
    assert 0.19 < float(module.v.abs().max()) <= 0.2
    assert (module.norms()[list(FILLERS)] > 0).all()


def test_without_counts_starts_as_long_as_a_plain_table():
    module = table(n=1003, d=64, counts=None)
    plain = torch.empty(1003, 64).uniform_(-0.1, 0.1)
    ratio = float(others(module.weight).norm(dim=1).mean() / plain.norm(dim=1).mean())
    assert 0.99 < ratio < 1.01


def test_weight_equals_the_naive_form():
    module = table()
    naive = others(reference.weight_norm_table(module.g, module.v))
    torch.testing.assert_close(others(module.weight).double(), naive, rtol=1e-6, atol=1e-7)
    assert module.weight[PAD].abs().sum() == 0


def test_look_up_works_on_the_gathered_rows_alone(monkeypatch):
    module = table()
    seen = []
    norm = torch.linalg.vector_norm

    def recorded(values, *args, **kwargs):
        seen.append(values.shape)
        return norm(values, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", recorded)
    module(torch.tensor([2, 3, 4]))
    assert seen == [(3, 5)]


def test_padding_row_stays_zero_and_fillers_are_trained():
    weight = dense()
    restored = table()
    restored.load_state_dict(restored.factor(weight))
    with torch.no_grad():
        restored.v[PAD] = 0.1  # as an old checkpoint may have it
    for module in (table(), restored):
        optimiser = torch.optim.Adam(module.parameters(), lr=0.1)
        filler = module.weight[FILLERS[0]].detach().clone()
        for _ in range(5):
            logits = module.project(module(torch.tensor([2, 3, PAD])))
            loss = F.cross_entropy(logits, torch.tensor([3, 4, 5]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert module.weight[PAD].abs().sum() == 0
        assert not torch.equal(module.weight[FILLERS[0]], filler)


@pytest.mark.parametrize("dtype", [FLOAT16, torch.bfloat16])
def test_padding_row_is_zero_in_half_precision(dtype):
    module = table().to(dtype)
    tokens = torch.tensor([[3, PAD]])
    assert torch.jit.script(module)(tokens)[0, 1].abs().sum() == 0
    for length in (2, 9):  # both forms of the product
        logits = module.project(torch.randn(length, 5).to(dtype))
        assert logits.isfinite().all() and not logits[:, PAD].any()
        module.zero_grad()
        (logits.float().logsumexp(1).sum() + module(tokens).float().sum()).backward()
        assert module.g.grad.isfinite().all() and module.v.grad.isfinite().all()
    torch.testing.assert_close(module.weight.float(), table().weight, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [FLOAT16, torch.bfloat16, torch.float32])
def test_a_short_direction_is_read_as_the_table_divides_by_it(dtype):
    """Files, exports and averages divided by a length that the model bounds in float16."""
    module = table().to(dtype)
    with torch.no_grad():
        module.v[3] = 2e-5
    entries = {name: module.state_dict()[name] for name in module.entries}
    read = WeightNormEmbedding.dense_rows(entries, torch.arange(37), torch.float32)
    torch.testing.assert_close(read, module.weight.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("gamma, tau", [(0.1, 100), (0.0, 3), (1.0, 5), (0.3, 2.5)])
def test_schedule_equals_equation_10(gamma, tau):
    for epoch in (0, 1, 2, 3, 50, 100, 101, 1000):
        expected = reference.gradient_scale(epoch, gamma, tau)
        assert gradient_scale(epoch, gamma, tau) == pytest.approx(expected, abs=1e-15)


def test_schedule_scales_the_gradient_of_the_lengths_alone():
    gradients = {}
    for epoch in (0, 5, 30):
        module = table(gamma=0.2, tau=10)
        module.set_epoch(epoch)
        features = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
        # Looked up and projected: the factor must act once on the gradient of each use.
        logits = module.project(features + module(torch.tensor([4] * 7)))
        F.cross_entropy(logits, torch.tensor([2, 3, 4, 5, 6, 7, 8])).backward()
        gradients[epoch] = module.g.grad, module.v.grad
    for epoch, scale in ((5, 0.6), (30, 0.2)):
        torch.testing.assert_close(gradients[epoch][0], scale * gradients[0][0])
        assert torch.equal(gradients[epoch][1], gradients[0][1])


def test_resumed_schedule_equals_the_uninterrupted_one():
    def train(module, optimiser, epochs):
        for epoch in epochs:
            module.set_epoch(epoch)
            generator = torch.Generator().manual_seed(epoch)
            tokens = torch.randint(2, 37, (20,), generator=generator)
            optimiser.zero_grad()
            F.cross_entropy(module.project(module(tokens)), tokens.roll(1)).backward()
            optimiser.step()

    def optimiser_of(module):
        return torch.optim.Adam(module.parameters(), lr=0.01)

    straight = table(gamma=0.1, tau=4)
    train(straight, optimiser_of(straight), range(1, 7))
    first = table(gamma=0.1, tau=4)
    first_optimiser = optimiser_of(first)
    train(first, first_optimiser, range(1, 4))
    second = table(gamma=0.1, tau=4)
    second_optimiser = optimiser_of(second)
    second.load_state_dict(first.state_dict())
    second_optimiser.load_state_dict(first_optimiser.state_dict())
    train(second, second_optimiser, range(4, 7))
    assert torch.equal(second.weight, straight.weight)


@pytest.mark.parametrize("scale", [1e-8, 1e-13, 1e-19, 1e-25])
def test_very_short_rows_keep_their_directions(scale):
    """Their squares vanish in float32, and what was shorter than 1e-12 became shorter still."""
    weight = dense()
    weight[4:] *= scale
    module = WeightNormEmbedding.from_dense(weight, PAD)
    expected = weight / scale
    torch.testing.assert_close(module.weight / scale, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(module.v[:4], weight[:4])


def test_a_zero_row_of_a_dense_table_stays_zero_but_can_be_trained():
    weight = dense()
    weight[7] = 0
    module = WeightNormEmbedding.from_dense(weight, PAD)
    assert module.weight[7].abs().sum() == 0
    module.project(torch.ones(8, 5)).sum().backward()
    assert float(module.g.grad[7]) != 0 and torch.isfinite(module.v.grad).all()
    assert float(module.g.grad[PAD]) == 0


@pytest.mark.parametrize("options, message", [
    ({"sigma": 0.0}, "sigma"),
    ({"init_range": float("inf")}, "init_range"),
    ({"tau": -1.0}, "tau"),
    ({"gamma": 1.5}, "gamma"),
    ({"gamma": float("nan")}, "gamma"),
    ({"counts": [3] * 5}, "counts, one for each row; found 5"),
])  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        table(**options)


def test_a_dictionary_without_counts_is_refused():
    with pytest.raises(DataError, match="dict.txt"):
        table(counts=[1] * 37)
