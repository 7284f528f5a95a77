"""From flags to embedding tables."""

from __future__ import annotations

from typing import Any, List

from fairseq import utils
from torch import nn

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.plugin.models.options import c1_of, gamma_of


def uncounted_rows(dictionary: Any) -> List[int]:
    """Rows that stand for no word: padding, and fairseq's ``madeupword`` fillers."""
    filler = "madeupword"
    return [dictionary.pad()] + [
        index for index, symbol in enumerate(dictionary.symbols) if symbol.startswith(filler)
    ]


def build_svd_table(options: Any, dictionary: Any, dim: int, path: Any = None) -> SVDEmbedding:
    """An SVD table for ``dictionary``, filled from an embedding file where ``path`` names one.

    Args:
        options: flags of :class:`SpectralOptions`.
        dictionary: fairseq dictionary.
        dim: d.
        path: file of pre-trained vectors, as for ``--encoder-embed-path``.
    """
    table = SVDEmbedding(
        len(dictionary),
        dim,
        dictionary.pad(),
        uncounted_rows(dictionary),
        prior=str(options.spectrum_prior),
        c1=c1_of(options),
        c2=options.spectrum_c2,
        gamma=gamma_of(options),
    )
    if path:
        dense = nn.Embedding(len(dictionary), dim, _weight=table.weight.detach())
        utils.load_embedding(utils.parse_embedding(path), dictionary, dense)
        table.load_state_dict(table.factor(dense.weight))
    return table
