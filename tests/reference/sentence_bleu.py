"""Sentence BLEU from counted n-grams; zero counts are smoothed as in Chen and Cherry, method 3."""

import math
from collections import Counter


def ngrams(words, order):
    return Counter(tuple(words[at : at + order]) for at in range(len(words) - order + 1))


def sentence_bleu(hypothesis, reference, highest):
    hypothesis, reference = hypothesis.split(), reference.split()
    logs, smoothed = [], 1.0
    for order in range(1, highest + 1):
        ours, theirs = ngrams(hypothesis, order), ngrams(reference, order)
        total = sum(ours.values())
        if total == 0:
            break
        matches = sum(min(count, theirs[gram]) for gram, count in ours.items())
        if matches == 0:
            smoothed *= 2
            matches = 1 / smoothed
        logs.append(math.log(matches / total))
    if not ngrams(hypothesis, 1) & ngrams(reference, 1):
        return 0.0
    short = math.exp(min(0.0, 1 - len(reference) / len(hypothesis)))
    return short * math.exp(sum(logs) / len(logs))


def nbest(contexts, highest):
    """Precision and recall over (references, hypotheses)."""
    precision = recall = 0.0
    for references, hypotheses in contexts:
        precision += sum(
            max(sentence_bleu(h, r, highest) for r in references) for h in hypotheses
        ) / len(hypotheses)
        recall += sum(
            max(sentence_bleu(h, r, highest) for h in hypotheses) for r in references
        ) / len(references)
    return precision / len(contexts), recall / len(contexts)
