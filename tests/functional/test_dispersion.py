"""The mean cosine within a sequence: by definition, and as its authors' package measures GPT-2."""

import math

import pytest
import torch

from spectral_fairseq.functional.row_penalties import SequenceCosine, dispersion_penalty
from tests.reference import row_penalties as naive

COUNTED = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()


def states(count=2, dtype=torch.float64, shift=0.0):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 5, 7, generator=generator, dtype=dtype) + shift for _ in range(count)]


@pytest.mark.parametrize("tau", [1.0, 0.3])
@pytest.mark.parametrize("shift", [0.0, 0.5, 3.0])
def test_it_equals_the_naive_form(shift, tau):
    layers = states(shift=shift)
    expected = naive.dispersion_penalty(layers, COUNTED, tau)
    found = dispersion_penalty(layers, COUNTED, tau=tau)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    halves = [layer.half() for layer in layers]
    found = dispersion_penalty(halves, COUNTED, tau=tau)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(naive.dispersion_penalty(halves, COUNTED, tau), rel=1e-5)


def test_gradient_within_the_bounds():
    layers = [layer.requires_grad_() for layer in states()]
    for layer in layers:
        unit = torch.nn.functional.normalize(layer.detach(), dim=-1)
        cosines = (unit @ unit.transpose(1, 2)).abs()
        cosines.diagonal(dim1=1, dim2=2).zero_()
        assert cosines.max() < 0.73  # beyond .75 the gradient is not that of the value
    assert torch.autograd.gradcheck(lambda *all: dispersion_penalty(all, COUNTED), layers)


def test_aligned_states_are_pushed_apart_with_the_slope_at_the_bound():
    z = torch.tensor([[[3.0, 4.0], [3.0, 4.1]]], dtype=torch.float64, requires_grad=True)
    dispersion_penalty([z], torch.ones(1, 2).bool()).backward()
    # R = -arccos(c)/pi of the one pair: dR/dc = 1 / (pi sqrt(1 - .75^2)).
    other = z.detach().clone().requires_grad_()
    left, right = other[0]
    cosine = left @ right / ((left.norm() + 0.01) * (right.norm() + 0.01))
    (cosine / (math.pi * math.sqrt(1 - 0.75**2))).backward()
    torch.testing.assert_close(z.grad, other.grad)
    moved = z.detach() - 0.1 * z.grad
    assert torch.cosine_similarity(*moved[0], dim=0) < torch.cosine_similarity(*z[0], dim=0)


def test_padding_counts_for_nothing():
    layers = [layer.requires_grad_() for layer in states()]
    dispersion_penalty(layers, COUNTED).backward()
    for layer in layers:
        assert not layer.grad[~COUNTED].any() and layer.grad[0].all()
        assert not layer.grad[2].any()  # a single state has no pair
    changed = [layer.detach().masked_fill(~COUNTED.unsqueeze(-1), math.nan) for layer in layers]
    expected = dispersion_penalty(layers, COUNTED).detach()
    assert torch.equal(dispersion_penalty(changed, COUNTED), expected)
    nothing = dispersion_penalty(layers, torch.zeros(3, 5).bool())
    nothing.backward()
    assert nothing.item() == 0


def test_of_long_sequences_counted_states_are_drawn():
    # Two opposite directions; only if padding were drawn would there be others.
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(20, 1)[None].double()
    counted = torch.ones(1, 40).bool()
    counted[0, 10:] = False
    z[~counted] = torch.tensor([0.0, 1.0]).double()
    torch.manual_seed(1)
    found = {round(float(dispersion_penalty([z], counted, positions=4)), 9) for _ in range(40)}
    bound = math.acos(0.75) / math.pi
    near, far = math.exp(-bound), math.exp(bound - 1)
    # 4, 3 or 2 of the 4 states on one side: 6, 3 or 2 of the 6 pairs are aligned.
    expected = {round(math.log((a * near + (6 - a) * far) / 6), 9) for a in (6, 3, 2)}
    assert found == expected
    # As many as there are: nothing is left to chance, and all of them count.
    few = dispersion_penalty([z], counted, positions=10)
    torch.testing.assert_close(few, dispersion_penalty([z], counted))
    both = dispersion_penalty([z, z], counted, positions=4)
    assert round(float(both), 9) in expected  # the same ones in all layers


def test_zero_states_have_a_gradient():
    z = torch.zeros(1, 3, 4, requires_grad=True)
    dispersion_penalty([z], torch.ones(1, 3).bool()).backward()
    assert torch.isfinite(z.grad).all()


# Of gpt2() below: what embedding-condensation 2.0 gives with transformers 4.47.1 for the embeddings
# and both layers, without the diagonal.
AUTHORS = [-0.069937648, 0.727618535, 0.748062674]


def value(states, sequences, blocks):
    found = SequenceCosine()
    for block, numbers in zip(states.split(blocks), sequences.split(blocks)):
        found.add(block, numbers)
    assert found.value() == found.value()
    return found.value()


@pytest.mark.parametrize("blocks", [1, 4, 40])
def test_against_the_naive_form(blocks):
    torch.manual_seed(0)
    lengths = [5, 1, 2, 11]
    states = torch.randn(sum(lengths), 7) + 0.3
    sequences = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    several = [part for part in states.split(lengths) if len(part) > 1]
    expected = naive.sequence_cosine(several)
    assert value(states, sequences, blocks) == pytest.approx(expected, rel=1e-6)


def test_without_pairs_there_is_none():
    assert SequenceCosine().value() is None
    assert value(torch.ones(3, 2), torch.arange(3), 2) is None
    assert value(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.zeros(2), 2) == 0  # no direction


TEXTS = torch.randint(0, 60, (3, 12), generator=torch.Generator().manual_seed(1))


def gpt2(transformers):
    """A model whose weights follow from a formula, so that they are the same in every version."""
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for index, (name, one) in enumerate(model.named_parameters()):
            wave = torch.sin(torch.arange(one.numel()) * (0.7 + index)).view_as(one)
            is_scale = "ln_" in name and name.endswith("weight")
            one.copy_(1 + 0.1 * wave if is_scale else 0.3 * wave)
    return model


def test_gpt2_as_its_authors_measure_it(transformers):
    model = gpt2(transformers)
    with torch.no_grad():
        layers = model(TEXTS, output_hidden_states=True).hidden_states
    rows = torch.arange(len(TEXTS)).repeat_interleave(TEXTS.size(1))
    found = [value(layer.flatten(0, 1), rows, 7) for layer in layers]
    assert found == pytest.approx(AUTHORS, abs=2e-6)


def test_the_authors_package_gives_these_figures(transformers):
    condensation = pytest.importorskip("embedding_condensation")

    def tokenizer(text, **_):
        ids = TEXTS[int(text)].unsqueeze(0)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    cosines = condensation.measure_embedding_condensation(
        gpt2(transformers),
        tokenizer,
        texts=[str(row) for row in range(len(TEXTS))],
        repetitions=len(TEXTS),
        plot=False,
        save_path=None,
        show_progress=False,
    ).cossim_by_layer
    pairs = ~torch.eye(TEXTS.size(1), dtype=torch.bool).numpy()
    assert [float(layer[pairs].mean()) for layer in cosines] == pytest.approx(AUTHORS, abs=2e-6)
