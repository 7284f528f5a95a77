from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest

from tests.compat.fairseq_process import Failure, FairseqProcess


def sentences_as_blocks() -> List[List[int]]:
    """--sample-break-mode eos."""
    import torch
    from fairseq.data import TokenBlockDataset

    tokens = [torch.tensor([5, 6, 2]), torch.tensor([7, 2]), torch.tensor([8, 9, 10, 2])]
    blocks = TokenBlockDataset(tokens, [3, 2, 4], None, pad=1, eos=2, break_mode="eos")
    return [block.tolist() for block in blocks]


def bucketed_lengths() -> List[int]:
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


def counts_of_spans() -> List[int]:
    """Masking without overlap counts in np.int; what follows it fails in some fairseq anyway."""
    from fairseq.data import data_utils

    np = data_utils.np
    return [int(n) for n in np.fromiter((n for n in (1, 2)), np.int)]


EXPECTED = [
    (sentences_as_blocks, [[5, 6, 2], [7, 2], [8, 9, 10, 2]], hasattr(np, "compat")),
    (bucketed_lengths, [3, 3, 3, 9, 9], hasattr(np, "compat")),
    (counts_of_spans, [1, 2], hasattr(np, "int")),
]


@pytest.mark.parametrize("function, expected, in_numpy", EXPECTED)
def test_works_where_numpy_has_retired_the_name(
    bare: FairseqProcess, patched: FairseqProcess, function: Any, expected: Any, in_numpy: bool
) -> None:
    assert patched.call(function) == expected
    if in_numpy:
        pytest.skip("this numpy still has the name")
    with pytest.raises(Failure, match="no attribute|unexpected keyword"):
        bare.call(function)


def names_in_numpy() -> List[bool]:
    import numpy as np
    from fairseq.data import data_utils

    assert data_utils.np.ndarray is np.ndarray
    return [hasattr(np, name) for name in ("int", "float", "compat")]


def test_numpy_itself_is_unchanged(bare: FairseqProcess, patched: FairseqProcess) -> None:
    assert patched.call(names_in_numpy) == bare.call(names_in_numpy)
