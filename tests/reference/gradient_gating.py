"""Adaptive gradient gating word by word and token by token, in float64."""

import torch


def gates(counts, updates, alpha, never_rare):
    """gate[group of the target][word], as lists; group 1 holds the rare words."""
    frequency = [float(count) / updates for count in counts]
    rare = [f < alpha and v not in never_rare for v, f in enumerate(frequency)]
    mean = sum(float(c) for c, r in zip(counts, rare) if r) / max(1, sum(rare))
    first = [f if r else 1.0 for f, r in zip(frequency, rare)]
    second = [
        min(float(c) / mean, 1.0) if mean else 0.0 if r else 1.0 for c, r in zip(counts, rare)
    ]
    second = [gate if r else 1.0 for gate, r in zip(second, rare)]
    return rare, first, second


def table_gradient(contexts, score_gradient, targets, rare, first, second):
    """sum_t gate(v, t) (d L / d s_tv) h_t for every word v."""
    total = torch.zeros(score_gradient.size(1), contexts.size(1), dtype=torch.float64)
    for t, y in enumerate(targets.tolist()):
        for v in range(total.size(0)):
            gate = 1.0 if v == y else (second[v] if rare[y] else first[v])
            total[v] += gate * float(score_gradient[t, v]) * contexts[t].double()
    return total
