"""From flags to embedding tables and output layers."""

from __future__ import annotations

from typing import Any, List, Optional

from fairseq import utils
from torch import nn

from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.heads import MixtureOfContexts, MixtureOfSoftmaxes, SoftmaxHead
from spectral_fairseq.plugin.models.options import c1_of, gamma_of


def uncounted_rows(dictionary: Any) -> List[int]:
    """Rows that stand for no word: padding, and fairseq's ``madeupword`` fillers."""
    filler = "madeupword"
    return [dictionary.pad()] + [
        index for index, symbol in enumerate(dictionary.symbols) if symbol.startswith(filler)
    ]


def build_table(options: Any, dictionary: Any, dim: int, path: Optional[str] = None) -> Any:
    """The table that ``--embedding-type`` names, one of :mod:`spectral_fairseq.embeddings`.

    Args:
        options: flags of :class:`SpectralOptions`.
        dictionary: fairseq dictionary.
        dim: d.
        path: file of pre-trained vectors, as for ``--encoder-embed-path``.

    Raises:
        ConfigurationError: options outside their range, or fewer words than an SVD needs.
        DataError: a dictionary without the counts that a weight-norm table starts from.
    """
    table: Any = _EMPTY_TABLES[str(options.embedding_type)](options, dictionary, dim)
    if path:
        # The host writes into ``weight.data``, which for a computed weight would go nowhere.
        dense = nn.Embedding(len(dictionary), dim, _weight=table.weight.detach().clone())
        utils.load_embedding(utils.parse_embedding(path), dictionary, dense)
        if isinstance(table, PlainEmbedding):
            table.load_state_dict({"weight": dense.weight})
        else:
            table.load_state_dict(table.factor(dense.weight))
    return table


def _svd(options: Any, dictionary: Any, dim: int) -> SVDEmbedding:
    return SVDEmbedding(
        len(dictionary),
        dim,
        dictionary.pad(),
        uncounted_rows(dictionary),
        prior=str(options.spectrum_prior),
        c1=c1_of(options),
        c2=options.spectrum_c2,
        gamma=gamma_of(options),
    )


def _weight_norm(options: Any, dictionary: Any, dim: int) -> WeightNormEmbedding:
    return WeightNormEmbedding(
        len(dictionary),
        dim,
        dictionary.pad(),
        uncounted_rows(dictionary),
        counts=dictionary.count,
        sigma=options.weight_norm_init_sigma,
        init_range=options.weight_norm_init_range,
        gamma=options.weight_norm_gradient_scale,
        tau=options.weight_norm_gradient_epochs,
    )


def _plain(options: Any, dictionary: Any, dim: int) -> PlainEmbedding:
    return PlainEmbedding(len(dictionary), dim, dictionary.pad())


_EMPTY_TABLES = {"plain": _plain, "svd": _svd, "weight-norm": _weight_norm}


def build_head(
    options: Any, dictionary: Any, dim: int, shared: Optional[nn.Module] = None
) -> nn.Module:
    """The output layer that ``--output-head`` names.

    Args:
        options: flags of :class:`SpectralOptions`.
        dictionary: target dictionary.
        dim: d_h, of the decoder's features.
        shared: the look-up table to share; ``None`` makes a table of width ``dim``.

    Raises:
        ConfigurationError: a shared table of another width than a softmax needs, or K < 1.
    """
    table: Any = build_table(options, dictionary, dim) if shared is None else shared
    kind = str(options.output_head)
    if kind != "softmax":
        mixture = {"mos": MixtureOfSoftmaxes, "moc": MixtureOfContexts}[kind]
        return mixture(table, dim, options.mixture_components, options.mixture_dropout)
    if table.embedding_dim != dim:
        raise ConfigurationError(
            "a shared table as wide as the decoder's output",
            f"a table of width {table.embedding_dim} and an output of width {dim}",
            "Give --decoder-input-dim and --decoder-output-dim the same value, or do not share "
            "the embeddings.",
        )
    return SoftmaxHead(table)
