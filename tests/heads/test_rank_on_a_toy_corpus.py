"""Tables 6 and 7 of the mixture paper in small: only a mixture of softmaxes exceeds rank d.

The corpus gives each of 48 contexts a next-word distribution of its own over 40 words, so the true
log-probability matrix has full rank; the tables have d = 5. All heads see the same learned context
features and are trained alike.
"""

import functools

import pytest
import torch
from torch import nn

from spectral_fairseq.embeddings import PlainEmbedding
from spectral_fairseq.functional.ranks import empirical_rank
from spectral_fairseq.heads import MixtureOfContexts, MixtureOfSoftmaxes, SoftmaxHead

CONTEXTS, WORDS, DIM, COMPONENTS = 48, 40, 5, 8


def corpus():
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(CONTEXTS, WORDS, generator=generator)
    logits[:, 1] = -1e4  # padding is never seen
    words = torch.multinomial(logits.softmax(-1), 60, replacement=True, generator=generator)
    return torch.arange(CONTEXTS).repeat_interleave(60), words.flatten()


@functools.cache
def trained(kind):
    """(rank of the log-probability matrix, training NLL per word) of one head."""
    torch.manual_seed(3)
    table = PlainEmbedding(WORDS, DIM, 1).double()
    if kind == "softmax":
        head = SoftmaxHead(table)
    else:
        mixture = {"mos": MixtureOfSoftmaxes, "moc": MixtureOfContexts}[kind]
        head = mixture(table, DIM, COMPONENTS)
    head = head.double()
    features = nn.Embedding(CONTEXTS, DIM).double()
    contexts, words = corpus()
    optimiser = torch.optim.Adam([*head.parameters(), *features.parameters()], lr=0.05)
    for _ in range(150):
        loss, _, nll, _ = head.loss(features(contexts), words)
        optimiser.zero_grad()
        (loss / len(words)).backward()
        optimiser.step()
    with torch.no_grad():
        log_p = torch.log_softmax(head(features.weight), -1)
    sigma = torch.linalg.svdvals(log_p)
    return empirical_rank(sigma, *log_p.shape, torch.float32), float(nll) / len(words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "moc"])
def test_one_softmax_is_bound_by_the_dimension(kind):
    rank, _ = trained(kind)
    assert rank <= DIM + 1  # the normaliser adds one


@pytest.mark.slow
def test_a_mixture_of_softmaxes_is_not_and_fits_better():
    rank, nll = trained("mos")
    assert rank > 2 * (DIM + 1)
    assert nll < min(trained("softmax")[1], trained("moc")[1])
