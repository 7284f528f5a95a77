"""Naive forms of relative attention and of Transformer-XL: one key, one encoding, at a time."""

import math

import torch
import torch.nn.functional as F


def encoding(distance, dim):
    """R of one distance: sines, then cosines."""
    angles = [distance / 10000 ** (2 * i / dim) for i in range((dim + 1) // 2)]
    values = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(values[:dim], dtype=torch.float64)


def attention(module, x, context, u, v, *, clamp=0, reach=None):
    """x (T, d) attends over context (K, d), whose last T rows are x's own; -> (T, d)."""
    heads, width, dim = module.heads, module.head_dim, x.size(1)
    first = context.size(0) - x.size(0)
    rows = []
    for i in range(x.size(0)):
        heard = []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            query = module.query.weight[part] @ x[i]
            scores, values = [], []
            for j in range(context.size(0)):
                distance = first + i - j
                if distance < 0 or (reach is not None and distance >= reach):
                    continue
                r = encoding(min(distance, clamp) if clamp else distance, dim)
                key = module.key_value.weight[: heads * width][part] @ context[j]
                values.append(module.key_value.weight[heads * width :][part] @ context[j])
                score = (query + u[h]) @ key + (query + v[h]) @ (module.position.weight[part] @ r)
                scores.append(score / math.sqrt(width))
            weights = torch.softmax(torch.stack(scores), 0)
            heard.append((weights.unsqueeze(1) * torch.stack(values)).sum(0))
        rows.append(module.out.weight @ torch.cat(heard))
    return torch.stack(rows)


def features(network, tokens, memories=None):
    """One stream, tokens (T,), memories one (M, d) a layer -> (features (T, d), layer inputs)."""
    reach = network.mem_len if network.same_length else None
    x = network.embed_tokens.weight[tokens] * math.sqrt(network.dim)
    inputs = []
    for index, layer in enumerate(network.layers):
        context = x if memories is None else torch.cat([memories[index], x])
        inputs.append(context)
        heard = attention(
            layer.attention,
            x,
            context,
            network.content_bias,
            network.position_bias,
            clamp=network.clamp_len,
            reach=reach,
        )
        x = normalised(layer.attention_norm, x + heard)
        inner = torch.relu(layer.inner.weight @ x.t() + layer.inner.bias.unsqueeze(1))
        x = normalised(layer.ffn_norm, x + (layer.outer.weight @ inner).t() + layer.outer.bias)
    return x, inputs


def normalised(norm, x):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
