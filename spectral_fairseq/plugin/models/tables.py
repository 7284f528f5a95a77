"""From flags to embedding tables and output layers."""

from __future__ import annotations

import math
from typing import Any, List, Optional

from fairseq import utils
from torch import nn

from spectral_fairseq.embeddings import PlainEmbedding, SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.heads import MixtureOfContexts, MixtureOfSoftmaxes, SoftmaxHead
from spectral_fairseq.plugin.models.options import c1_of, gamma_of


def uncounted_rows(dictionary: Any) -> List[int]:
    """Rows that stand for no word: padding, and fairseq's ``madeupword`` fillers."""
    filler = "madeupword"
    # A dictionary cut by --output-dictionary-size still shows the symbols that it lacks.
    symbols = dictionary.symbols[: len(dictionary)]
    return [dictionary.pad()] + [
        index for index, symbol in enumerate(symbols) if symbol.startswith(filler)
    ]


def build_table(
    options: Any,
    dictionary: Any,
    dim: int,
    path: Optional[str] = None,
    init_range: Optional[float] = None,
) -> Any:
    """The table that ``--embedding-type`` names, one of :mod:`spectral_fairseq.embeddings`.

    Args:
        options: flags of :class:`SpectralOptions`.
        dictionary: fairseq dictionary.
        dim: d.
        path: file of pre-trained vectors, as for ``--encoder-embed-path``.
        init_range: r, where the usual initialisation of an architecture is uniform in [-r, r]
            rather than fairseq's rows of norm 1. An SVD table starts with the Frobenius norm of
            such a table; a weight-norm table has an initialisation of its own.

    Raises:
        ConfigurationError: options outside their range, or fewer words than an SVD needs.
        DataError: a dictionary without the counts that a weight-norm table starts from.
    """
    table: Any = _EMPTY_TABLES[str(options.embedding_type)](options, dictionary, dim, init_range)
    if path:
        # The host writes into ``weight.data``, which for a computed weight would go nowhere.
        dense = nn.Embedding(len(dictionary), dim, _weight=table.weight.detach().clone())
        utils.load_embedding(utils.parse_embedding(path), dictionary, dense)
        if isinstance(table, PlainEmbedding):
            table.load_state_dict({"weight": dense.weight})
        else:
            table.load_state_dict(table.factor(dense.weight))
    return table


def _svd(
    options: Any, dictionary: Any, dim: int, init_range: Optional[float] = None
) -> SVDEmbedding:
    norm = None
    if init_range is not None:
        counted = len(dictionary) - len(uncounted_rows(dictionary))
        norm = init_range * math.sqrt(counted * dim / 3)  # the variance is r^2 / 3
    with arguments_as_flags(
        kind="--spectrum-prior", c1="--spectrum-c1", c2="--spectrum-c2", gamma="--spectrum-gamma"
    ):
        return SVDEmbedding(
            len(dictionary),
            dim,
            dictionary.pad(),
            uncounted_rows(dictionary),
            prior=str(options.spectrum_prior),
            c1=c1_of(options),
            c2=options.spectrum_c2,
            gamma=gamma_of(options),
            frobenius_norm=norm,
        )


def _weight_norm(
    options: Any, dictionary: Any, dim: int, _: Optional[float] = None
) -> WeightNormEmbedding:
    return WeightNormEmbedding(
        len(dictionary),
        dim,
        dictionary.pad(),
        uncounted_rows(dictionary),
        counts=dictionary.count[: len(dictionary)],
        sigma=options.weight_norm_init_sigma,
        init_range=options.weight_norm_init_range,
        gamma=options.weight_norm_gradient_scale,
        tau=options.weight_norm_gradient_epochs,
    )


def _plain(
    options: Any, dictionary: Any, dim: int, init_range: Optional[float] = None
) -> PlainEmbedding:
    table = PlainEmbedding(len(dictionary), dim, dictionary.pad())
    if init_range is not None:
        nn.init.uniform_(table.weight, -init_range, init_range)
        nn.init.zeros_(table.weight[dictionary.pad()])
    return table


_EMPTY_TABLES = {"plain": _plain, "svd": _svd, "weight-norm": _weight_norm}


def build_head(
    options: Any,
    dictionary: Any,
    dim: int,
    shared: Optional[nn.Module] = None,
    *,
    bias: bool = False,
    locked_dim: Optional[int] = None,
) -> nn.Module:
    """The output layer that ``--output-head`` names.

    Args:
        options: flags of :class:`SpectralOptions`.
        dictionary: target dictionary.
        dim: d_h, of the decoder's features.
        shared: the look-up table to share; ``None`` makes a table of width ``dim``.
        bias: give the scores a bias.
        locked_dim: axis along which a mixture's dropout mask holds.

    Raises:
        ConfigurationError: a shared table of another width than a softmax needs, or K < 1.
    """
    table: Any = build_table(options, dictionary, dim) if shared is None else shared
    kind = str(options.output_head)
    if kind != "softmax":
        mixture = {"mos": MixtureOfSoftmaxes, "moc": MixtureOfContexts}[kind]
        return mixture(
            table,
            dim,
            options.mixture_components,
            options.mixture_dropout,
            bias=bias,
            locked_dim=locked_dim,
            context_scale=options.mixture_context_scale,
        )
    if table.embedding_dim != dim:
        raise ConfigurationError(
            "a shared table as wide as the decoder's output",
            f"a table of width {table.embedding_dim} and an output of width {dim}",
            "Give --decoder-input-dim and --decoder-output-dim the same value, or do not share "
            "the embeddings.",
        )
    return SoftmaxHead(table, bias=bias)
