"""The AWD-LSTM cell by cell, with its masks as arguments."""

import torch


def lstm_layer(steps, hidden, cell, w_ih, w_hh, b_ih, b_hh):
    """Outputs and the last state; ``steps`` is a list of tensors of shape (B, d)."""
    outputs = []
    for x in steps:
        i, f, g, o = (x @ w_ih.t() + b_ih + hidden @ w_hh.t() + b_hh).chunk(4, dim=1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        outputs.append(hidden)
    return outputs, hidden, cell


def features(tokens, weight, layers, masks):
    """Dropped and raw outputs of the last layer, each of shape (B, T, d_h).

    Args:
        tokens: shape (B, T).
        weight: table, shape (N, d).
        layers: (w_ih, w_hh, b_ih, b_hh) of each.
        masks: ``words`` (N,), ``input`` (B, d), ``hidden`` a list of (B, width) between layers,
            ``weights`` a list shaped as each w_hh, ``output`` (B, d_h); each already divided by
            1 - p.
    """
    bsz, length = tokens.shape
    steps = []
    for t in range(length):
        rows = torch.stack(
            [weight[tokens[b, t]] * masks["words"][tokens[b, t]] for b in range(bsz)]
        )
        steps.append(rows * masks["input"])
    for index, (w_ih, w_hh, b_ih, b_hh) in enumerate(layers):
        if index > 0:
            steps = [step * masks["hidden"][index - 1] for step in steps]
        zeros = w_hh.new_zeros(bsz, w_hh.size(1))
        steps, _, _ = lstm_layer(
            steps, zeros, zeros, w_ih, w_hh * masks["weights"][index], b_ih, b_hh
        )
    raw = torch.stack(steps, dim=1)
    return raw * masks["output"].unsqueeze(1), raw


def loss(tokens, targets, weight, bias, layers, masks, alpha, beta):
    """Mean NLL of a tied softmax + alpha AR + beta TAR."""
    dropped, raw = features(tokens, weight, layers, masks)
    log_probs = torch.log_softmax(dropped @ weight.t() + bias, dim=-1)
    nll = -torch.stack(
        [log_probs[b, t, targets[b, t]] for b in range(len(tokens)) for t in range(tokens.size(1))]
    ).mean()
    activation = dropped.pow(2).mean()
    temporal = (raw[:, 1:] - raw[:, :-1]).pow(2).mean()
    return nll + alpha * activation + beta * temporal
