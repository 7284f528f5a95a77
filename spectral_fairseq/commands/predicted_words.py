"""What language models predict next, and where the first of two is ahead.

Table 14 of Yang et al., ICLR 2018, https://openreview.net/forum?id=HkwZSG-CZ, compares two models
at positions where one of them gives the true next word a much higher probability.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.commands.models import LanguageModel
from spectral_fairseq.errors import (
    ConfigurationError,
    DataError,
    check_count,
    check_enough,
    check_range,
)
from spectral_fairseq.lm.carry import Carry

Sentence = Sequence[str]
Place = Tuple[int, int]
"""Number of a sentence, and number of its words that the models have read."""


class NextWords(NamedTuple):
    """What a model predicts at every position of a sentence of n words.

    Attributes:
        indices: the most probable words, best first, shape (n + 1, k).
        probabilities: theirs, shape (n + 1, k).
        reference: probability of the word that follows, shape (n,).
    """

    indices: Tensor
    probabilities: Tensor
    reference: Tensor


def predict_next(model: LanguageModel, sentence: Sentence, top: int) -> NextWords:
    """What a model predicts before each word of a sentence and after the last one.

    Each sentence is read by itself, after the end of a sentence. Words that the dictionary lacks
    are read as ``<unk>``.

    Args:
        model: the language model.
        sentence: n words; ``</s>`` stands for the end of a sentence.
        top: k.
    """
    words = [model.dictionary.index(word) for word in sentence]
    tokens = torch.tensor([[model.start, *words]])  # [1, n + 1]
    longest = None if model.stateful else model.model.max_positions()
    if longest is not None and tokens.size(1) > longest:
        wanted = f"at most {longest - 1} words in a sentence, which the model can read at once"
        raise DataError(wanted, f"{len(words)}", "Shorten the sentence.")
    state: Dict[str, Any] = {"carry": Carry()} if model.stateful else {}
    lengths = torch.tensor([tokens.size(1)])
    with torch.no_grad():
        net_output = model.model(tokens, src_lengths=lengths, **state)
        # Given targets, fairseq's adaptive softmax would leave out the clusters without one.
        log_p = model.model.get_normalized_probs(net_output, log_probs=True, sample=None)
    probabilities = log_p[0].float().exp()  # [n + 1, N]
    reference = probabilities[:-1].gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1)
    probabilities[:, model.padding] = 0
    best = probabilities.topk(min(top, probabilities.size(1)), 1)
    return NextWords(best.indices, best.values, reference)


def widest_gaps(first: Sequence[NextWords], second: Sequence[NextWords], count: int) -> List[Place]:
    """The positions at which the first model is ahead most, as the paper's cases were found.

    Returns:
        Positions by falling difference of the log-probabilities of the next word, all above 0.
    """
    gaps = [
        (float(gap), (number, position))
        for number, (prediction, other_prediction) in enumerate(zip(first, second))
        for position, gap in enumerate(
            prediction.reference.log() - other_prediction.reference.log()
        )
    ]
    ahead = sorted((each for each in gaps if each[0] > 0), key=lambda each: -each[0])
    return [place for _, place in ahead[:count]]


def compare_next_words(
    models: Sequence[Tuple[str, LanguageModel]],
    sentences: Sequence[Sentence],
    top: int = 5,
    gaps: int = 0,
) -> List[Dict[str, Any]]:
    """The next words of each model after each sentence, or where two models differ most.

    Args:
        models: pairs of a label and a model, all with the same dictionary.
        sentences: words of each.
        top: number of words to list.
        gaps: number of positions at which the first of two models is ahead most; 0 takes the end
            of each sentence.

    Returns:
        For each position ``context`` and ``reference``, the word that follows or ``None``, and
        ``models``: pairs of ``word`` and ``probability``, and that of the reference.
    """
    check_range("`top`", top, at_least=1, whole=True)
    check_range("`gaps`", gaps, at_least=0, whole=True)
    if gaps:
        check_count(len(models), 2, "models for `gaps`", "Give two checkpoints, or drop `gaps`.")
    symbols = models[0][1].dictionary.symbols
    for label, model in models[1:]:
        if model.dictionary.symbols != symbols:
            raise ConfigurationError(
                f"models with one dictionary, that of {models[0][0]}",
                f"another one with {label}",
                "Compare models that were trained on the same binarised data.",
            )
    check_enough(len(sentences), 1, "sentence", "Give one sentence a line.")
    predictions = [
        [predict_next(model, sentence, top) for sentence in sentences] for _, model in models
    ]
    places = [(number, len(sentence)) for number, sentence in enumerate(sentences)]
    if gaps:
        places = widest_gaps(predictions[0], predictions[1], gaps)
    return [
        {
            "context": " ".join(sentences[number][:position]),
            "reference": next(iter(sentences[number][position:]), None),
            "models": [
                {"label": label, **_listed(of_model[number], position, symbols)}
                for (label, _), of_model in zip(models, predictions)
            ],
        }
        for number, position in places
    ]


def _listed(prediction: NextWords, position: int, symbols: Sequence[str]) -> Dict[str, Any]:
    pairs = zip(prediction.indices[position].tolist(), prediction.probabilities[position].tolist())
    known = position < prediction.reference.size(0)
    return {
        "next": [{"word": symbols[index], "probability": p} for index, p in pairs],
        "reference": float(prediction.reference[position]) if known else None,
    }
