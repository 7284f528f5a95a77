"""Naive form of the continuous cache: one token, one dictionary of words at a time."""

import math


def log_probabilities(log_model, features, targets, window, theta, weight):
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
