"""Segments of streams and beam search for the tests of stateful language models."""

import torch
from fairseq.sequence_generator import SequenceGenerator


def segments(task, bsz=3, length=7, seed=0, pad=0):
    """A batch of ``bsz`` segments of random words, the last one with ``pad`` padding tokens."""
    padding = task.target_dictionary.pad()
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(4, 49, (bsz, length + 1), generator=generator)
    tokens, target = text[:, :-1].clone(), text[:, 1:].clone()
    if pad:
        tokens[-1, -pad:] = target[-1, -pad:] = padding
    return {
        "net_input": {"src_tokens": tokens, "src_lengths": torch.full((bsz,), length)},
        "target": target,
        "ntokens": int(target.ne(padding).sum()),
    }


def beam_search(model, task, stateful):
    """Tokens of the hypotheses after two prefixes, with or without incremental state."""
    source = {"net_input": {"src_tokens": torch.tensor([[2, 7, 9], [2, 11, 5]])}}
    prefix = source["net_input"]["src_tokens"][:, 1:]
    generator = SequenceGenerator(
        [model], task.target_dictionary, beam_size=3, max_len_b=8, min_len=4
    )
    if not stateful:
        generator.model.has_incremental = False
    finals = generator.forward(source, prefix_tokens=prefix, bos_token=2)
    return [[hypothesis["tokens"].tolist() for hypothesis in beam] for beam in finals]
