"""A language model with a state, as small as can be: what lm/ asks of a model and no more."""

import torch
from torch import nn

from spectral_fairseq.lm.evaluation import StreamReader

PADDING, START = 1, 2


class TinyStateful(nn.Module):
    stateful = True

    def __init__(self, words=13, dim=6, seed=0, dropout=0.5):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(words, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(dim, words)
        self.output.weight = self.embed.weight  # one parameter, two names
        self.forwards = 0

    def forward(self, src_tokens, carry=None, **_):
        self.forwards += 1
        state = None if carry is None else carry.state
        features, state = self.lstm(self.dropout(self.embed(src_tokens)), state)
        if carry is not None:
            carry.state = tuple(one.detach() for one in state)
        return self.output(self.dropout(features)), {"features": features}

    def get_normalized_probs(self, net_output, **_):
        return torch.log_softmax(net_output[0], -1)


def tiny_model(**options):
    """In evaluation mode and float64, with weights large enough to prefer some words."""
    model = TinyStateful(**options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def corpus(length, words=13, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, words, (length,), generator=generator, dtype=torch.int32)


def reader(model, streams=1, segment=5):
    return StreamReader(model, PADDING, START, streams, segment)
