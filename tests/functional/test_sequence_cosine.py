"""The mean cosine within a sequence: by definition, and as its authors' package measures GPT-2."""

import pytest
import torch

from spectral_fairseq.functional.hidden_states import SequenceCosine
from tests.reference import measures as naive

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
