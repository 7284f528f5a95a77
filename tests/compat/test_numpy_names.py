"""Names that numpy has retired."""

import numpy as np
import pytest

from tests.compat.fairseq_process import Fails


def sentences_as_blocks():
    """--sample-break-mode eos."""
    import torch
    from fairseq.data import TokenBlockDataset

    tokens = [torch.tensor([5, 6, 2]), torch.tensor([7, 2]), torch.tensor([8, 9, 10, 2])]
    blocks = TokenBlockDataset(tokens, [3, 2, 4], None, pad=1, eos=2, break_mode="eos")
    return [block.tolist() for block in blocks]


def bucketed_lengths():
    """--num-batch-buckets: percentiles of the lengths, then a token count for each pair."""
    import torch
    from fairseq.data import Dictionary, LanguagePairDataset, ListDataset

    words = Dictionary()
    words.add_symbol("w")
    sizes = [1, 2, 3, 4, 9]
    sentences = ListDataset([torch.full((n,), 4) for n in sizes], sizes)
    pairs = LanguagePairDataset(
        sentences, sentences.sizes, words, sentences, sentences.sizes, words, num_buckets=2
    )
    return [int(n) for n in pairs.bucketed_num_tokens]


def counts_of_spans():
    """Masking without overlap counts in np.int; what follows it fails in some fairseq anyway."""
    from fairseq.data import data_utils

    np = data_utils.np
    return [int(n) for n in np.fromiter((n for n in (1, 2)), np.int)]


@pytest.mark.parametrize("function, expected, in_numpy", [
    (sentences_as_blocks, [[5, 6, 2], [7, 2], [8, 9, 10, 2]], hasattr(np, "compat")),
    (bucketed_lengths, [3, 3, 3, 9, 9], hasattr(np, "compat")),
    (counts_of_spans, [1, 2], hasattr(np, "int")),
])  # fmt: skip
def test_works_where_numpy_has_retired_the_name(bare, patched, function, expected, in_numpy):
    patched.gives(expected, function)
    if in_numpy:
        pytest.skip("this numpy still has the name")
    bare.gives(Fails("no attribute|unexpected keyword"), function)


def names_in_numpy():
    import numpy as np
    from fairseq.data import data_utils

    assert data_utils.np.ndarray is np.ndarray
    return [hasattr(np, name) for name in ("int", "float", "compat")]


def test_numpy_itself_is_unchanged(bare, patched):
    patched.gives(bare.call(names_in_numpy), names_in_numpy)
