"""Scores of one training: translations as wholes and by frequency of words, perplexities."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
import torch

SEEN_RARELY = range(1, 10)  # occurrences in the training text
_BANDS = {"0": range(1), "1-9": SEEN_RARELY, "10-99": range(10, 100)}
OTHER_BAND = "100-"

Scored = Tuple[torch.Tensor, torch.Tensor]
"""Some targets of a corpus, and the logarithm of the probability of each, float64."""


def band_of(count: int) -> str:
    """Name of the frequency band of a word that occurs so often in the training text."""
    return next((name for name, band in _BANDS.items() if count in band), OTHER_BAND)


def words_of(line: str) -> List[str]:
    """Words as sacreBLEU's default tokenizer separates them."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return str(Tokenizer13a()(line)).split()


def recall_by_band(
    hypotheses: Sequence[str], references: Sequence[str], training: Sequence[str]
) -> Dict[str, List[int]]:
    """How many words of the references stand in the translations, by frequency in training.

    A word that occurs twice in a reference and once in its translation is found once.

    Args:
        hypotheses: one a segment.
        references: one a segment.
        training: lines of the training text in the same language.

    Returns:
        band -> number of words found and number of words.
    """
    counts = collections.Counter(word for line in training for word in words_of(line))
    found = {band: [0, 0] for band in (*_BANDS, OTHER_BAND)}
    for hypothesis, reference in zip(hypotheses, references):
        produced = collections.Counter(words_of(hypothesis))
        for word, times in collections.Counter(words_of(reference)).items():
            band = found[band_of(counts[word])]
            band[0] += min(times, produced[word])
            band[1] += times
    return found


def translation_scores(
    hypotheses: List[str], references: List[str], training: Sequence[str]
) -> Dict[str, Any]:
    """BLEU, chrF and TER with signatures, and the recall of rare words."""
    from sacrebleu.metrics import BLEU, CHRF, TER

    result: Dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF()), ("ter", TER())):
        score = metric.corpus_score(hypotheses, [references])
        result[name] = round(score.score, 3)
        result[f"{name}_signature"] = f"{score.name}|{metric.get_signature()}"
    recall = recall_by_band(hypotheses, references, training)
    found, of = recall["1-9"]
    rare = {"rare_recall": round(found / of, 5)} if of else {}
    return {**result, **rare, "recall": recall}


def bleu_counts(hypotheses: List[str], references: List[str]) -> np.ndarray:
    """Shape (segments, 10): what :func:`bleu_of_sums` needs of each segment."""
    from sacrebleu.metrics import BLEU

    return np.array(BLEU()._extract_corpus_statistics(hypotheses, [references]), dtype=float)


def bleu_of_sums(sums: np.ndarray) -> float:
    """Corpus BLEU from the summed counts of its segments."""
    from sacrebleu.metrics import BLEU

    return float(BLEU()._compute_score_from_stats([int(number) for number in sums]).score)


def perplexities(checkpoint: Path, data: Path, subset: str, streams: int = 10) -> Dict[str, Any]:
    """Perplexity of a split, and that of its words by how often the training text has them.

    A model with a state reads ``streams`` parts of the split side by side. Any other reads blocks
    as long as in training, of which the second half is scored, so that each word has a context.

    Returns:
        ``SUBSET_ppl``, ``rare_SUBSET_ppl`` of words seen one to nine times, and ``bands``:
        band -> sum of negative log-likelihoods and number of words.
    """
    from spectral_fairseq.commands.importing import import_plugin

    import_plugin()
    from spectral_fairseq.commands.models import load_language_model, open_corpus

    loaded = load_language_model(checkpoint, data, {})
    size = int(loaded.settings["tokens_per_sample"])
    corpus = open_corpus(data, subset, loaded.dictionary)
    scored = (
        _scored_streams(loaded, corpus, streams, size)
        if loaded.stateful
        else _scored_blocks(loaded, corpus, size)
    )
    nll = torch.zeros(len(loaded.dictionary), dtype=torch.float64)
    times = torch.zeros_like(nll)
    for targets, log_probabilities in scored:
        nll.index_add_(0, targets, -log_probabilities)
        times.index_add_(0, targets, torch.ones_like(log_probabilities))
    bands: Dict[str, List[float]] = {band: [0.0, 0.0] for band in (*_BANDS, OTHER_BAND)}
    for word, (loss, number) in enumerate(zip(nll.tolist(), times.tolist())):
        if number:
            band = bands[_band_of_symbol(loaded.dictionary, word)]
            band[0], band[1] = band[0] + loss, band[1] + number
    rare, of = bands["1-9"]
    result: Dict[str, Any] = {
        f"{subset}_ppl": round(math.exp(float(nll.sum() / times.sum())), 4),
        "bands": {name: [round(loss, 3), int(number)] for name, (loss, number) in bands.items()},
    }
    return {**result, f"rare_{subset}_ppl": round(math.exp(rare / of), 3)} if of else result


@torch.no_grad()
def _scored_streams(loaded: Any, corpus: Any, streams: int, size: int) -> Iterator[Scored]:
    """All targets of a corpus with their log-probabilities, by a model with a state."""
    from spectral_fairseq.lm.carry import Carry
    from spectral_fairseq.lm.evaluation import StreamReader

    reader = StreamReader(loaded.model, loaded.padding, loaded.start, streams, size)
    carry = Carry()
    for segment in reader.segments(corpus):
        read = reader.predict(segment, carry)
        yield read.targets[read.counted], read.log_probabilities[read.counted].double()


@torch.no_grad()
def _scored_blocks(loaded: Any, corpus: Any, size: int) -> Iterator[Scored]:
    """The same by a model without a state, in blocks of which the second half is scored."""
    tokens = torch.cat([torch.tensor([loaded.start]), corpus[:]])
    context = size // 2
    for first in range(0, len(corpus), size - context):
        end = min(first + size - context, len(corpus))
        left = max(first - context, 0)
        targets = tokens[left + 1 : end + 1]
        output = loaded.model(tokens[None, left:end], src_lengths=torch.tensor([end - left]))
        # Given targets, fairseq's adaptive softmax fills no other clusters than theirs.
        log_p = loaded.model.get_normalized_probs(output, log_probs=True, sample=None)[0]
        of_targets = log_p.gather(1, targets[:, None])[:, 0].double()
        yield targets[first - left :], of_targets[first - left :]


def _band_of_symbol(dictionary: Any, index: int) -> str:
    """The band of a word by the counts in the dictionary; fairseq's own symbols are frequent."""
    return OTHER_BAND if index < dictionary.nspecial else band_of(dictionary.count[index])
