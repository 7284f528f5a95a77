"""Naive form of the adaptive softmax: one distribution over the head, one over each cluster."""

import torch


def log_probabilities(features, weight, bias, cluster_weight, cluster_bias, cutoffs):
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
