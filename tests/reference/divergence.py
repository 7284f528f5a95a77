"""Pairwise Kullback-Leibler divergence, pair by pair, float64."""


def expected_pairwise_kl(log_probabilities):
    rows = log_probabilities.double()
    total, pairs = 0.0, 0
    for i, p in enumerate(rows):
        for j, q in enumerate(rows):
            if i != j:
                total += float((p.exp() * (p - q)).sum())
                pairs += 1
    return total / pairs
