"""The losses of the output layer, with the scores of all words held at once.

In turn: mixtures of softmaxes and of contexts with the smoothed loss, the z-loss and the soft cap,
the adversarial softmax, two passes (R-Drop), and the adaptive softmax.
"""

import torch


# Mixture outputs and the smoothed loss, of which the losses below are made.
def log_mixture(contexts, log_prior, matrix, bias=None):
    """contexts (*, K, d), log_prior (*, K), matrix (N, d), bias (N,) -> (*, N)."""
    scores = torch.nn.functional.linear(contexts, matrix, bias)  # [*, K, N]
    return torch.logsumexp(log_prior.unsqueeze(-1) + torch.log_softmax(scores, -1), -2)


def log_mixture_of_contexts(contexts, log_prior, matrix, bias=None):
    mixed = (log_prior.exp().unsqueeze(-1) * contexts).sum(-2)
    return torch.log_softmax(torch.nn.functional.linear(mixed, matrix, bias), -1)


def kept_tokens(targets, ignore_index):
    """The mask of the tokens that count, (T,)."""
    return torch.ones_like(targets).bool() if ignore_index is None else targets != ignore_index


def smoothed_nll(log_probabilities, targets, label_smoothing=0.0, ignore_index=None):
    """(loss_sum, nll_sum) of (T, N) log-probabilities; the smoothed mass is spread over N - 1."""
    kept = kept_tokens(targets, ignore_index)
    log_probabilities, targets = log_probabilities[kept], targets[kept]
    nll = -log_probabilities.gather(1, targets.unsqueeze(1)).sum()
    smooth = -log_probabilities.sum()
    eps_i = label_smoothing / (log_probabilities.size(1) - 1)
    return (1 - label_smoothing - eps_i) * nll + eps_i * smooth, nll


def adversarial_log_mixture(contexts, log_prior, targets, matrix, epsilon, bias=None):
    """The log-mixture (T, N) with each expert's target score at its minimum over the worst delta.

    The delta of length eps ||w_y|| is built for every token and expert and added to w_y.
    """
    scores = torch.nn.functional.linear(contexts, matrix, bias)  # [T, K, N]
    rows = []
    for token, y in enumerate(targets.tolist()):
        experts = []
        for h, expert in zip(contexts[token], scores[token]):
            delta = -epsilon * matrix[y].norm() * h / h.norm()
            experts.append(expert.index_add(0, torch.tensor([y]), (delta @ h).unsqueeze(0)))
        rows.append(torch.stack(experts))
    joint = torch.log_softmax(torch.stack(rows), -1) + log_prior.unsqueeze(-1)
    return torch.logsumexp(joint, 1)


# The z-loss and the soft cap, token by token.
def softcapped(scores, softcap):
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def z_losses(scores, targets, z_loss=0.0, softcap=None, label_smoothing=0.0, ignore_index=None):
    """(loss, plain loss, nll, squares), each summed over tokens, of scores (T, N)."""
    scores = softcapped(scores, softcap)
    plain, nll = smoothed_nll(scores.log_softmax(-1), targets, label_smoothing, ignore_index)
    squares = sum(
        (row.exp().sum().log() ** 2 for row, y in zip(scores, targets) if y != ignore_index),
        scores[:0].sum(),
    )
    return plain + z_loss * squares, plain, nll, squares


# The adversarial softmax by its inner problem: the worst delta, built and added to the table.
def adversarial_logits(features, table, targets, epsilon):
    rows = []
    for h, y in zip(features.double(), targets.tolist()):
        perturbed = table.double()
        if float(h.norm()) > 0:
            delta = -epsilon * perturbed[y].norm() * h / h.norm()
            perturbed = perturbed.index_add(0, torch.tensor([y]), delta.unsqueeze(0))
        rows.append(perturbed @ h)
    return torch.stack(rows)


# Losses of two passes in the notation of their papers.
def kl(log_p, log_q):
    """KL(p||q) of each row."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def r_drop(first, second, targets, alpha, label_smoothing=0.0, ignore_index=None):
    """(objective, mean NLL) from log-probabilities (T, N); arXiv 2106.14448."""
    losses, nlls = zip(
        *(smoothed_nll(p, targets, label_smoothing, ignore_index) for p in (first, second))
    )
    kept = kept_tokens(targets, ignore_index)
    divergence = (kl(first[kept], second[kept]) + kl(second[kept], first[kept])).sum() / 2
    return losses[0] + losses[1] + alpha * divergence, (nlls[0] + nlls[1]) / 2


# The adaptive softmax: one distribution over the head, one over each cluster.
def log_adaptive_softmax(features, weight, bias, cluster_weight, cluster_bias, cutoffs):
    """features (T, d), weight (N, d), bias (N,), vectors and biases of J clusters -> (T, N).

    Word by word, as P(w) = P_head(w), or P_head(cluster) P_cluster(w); cluster_weight (J, d),
    cluster_bias (J,).
    """
    words = weight.size(0)
    scores = features @ weight.t() + bias
    edges = [*cutoffs, words]
    first = cutoffs[0]
    head = torch.cat([scores[:, :first], features @ cluster_weight.t() + cluster_bias], 1)
    head = head.exp() / head.exp().sum(1, keepdim=True)
    columns = []
    for word in range(words):
        if word < first:
            columns.append(head[:, word])
            continue
        cluster = next(j for j in range(len(cutoffs)) if edges[j] <= word < edges[j + 1])
        own = scores[:, edges[cluster] : edges[cluster + 1]].exp()
        columns.append(head[:, first + cluster] * scores[:, word].exp() / own.sum(1))
    return torch.stack(columns, 1).log()
