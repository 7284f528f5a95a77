"""Evaluation of models of text: continuous cache, dynamic evaluation, sentence BLEU."""

import math
from collections import Counter

import torch


# The continuous cache: one token, one dictionary of words at a time.
def log_with_cache(log_model, features, targets, window, theta, weight):
    """One stream: log_model (T, N), features (T, d), targets (T,) -> log p of each target.

    The pair i is (features[i], targets[i]); token t sees the pairs before it, ``window`` of them.
    """
    result = []
    for t, word in enumerate(targets.tolist()):
        model = math.exp(float(log_model[t, word]))
        pairs = range(max(0, t - window), t)
        if not pairs:
            result.append(math.log(model))
            continue
        mass = {}
        for i in pairs:
            seen = int(targets[i])
            score = math.exp(theta * float(features[t] @ features[i]))
            mass[seen] = mass.get(seen, 0.0) + score
        cache = mass.get(word, 0.0) / sum(mass.values())
        result.append(math.log((1 - weight) * model + weight * cache))
    return result


# Dynamic evaluation: the update rule written out for each tensor in turn.
def root_mean_squares(gradients):
    """``gradients``: one list of tensors for each training batch."""
    batches = len(gradients)
    return [torch.sqrt(sum(g * g for g in each) / batches) for each in zip(*gradients)]


def dynamic_update(weights, trained, gradients, rms, rate, decay, epsilon):
    """New weights, as a list."""
    mean = sum(r.mean() for r in rms) / len(rms)
    new = []
    for w, w0, g, r in zip(weights, trained, gradients, rms):
        rates = torch.minimum(r / mean, torch.tensor(1 / decay, dtype=r.dtype))
        new.append(w + decay * rates * (w0 - w) - rate * g / (r + epsilon))
    return new


# Sentence BLEU from counted n-grams; zero counts are smoothed as in Chen and Cherry, method 3.
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
