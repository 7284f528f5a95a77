"""Build embedding tables and output layers from flags."""

from __future__ import annotations

from typing import Any, List, Optional, Type

from fairseq import utils
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.checkpoints.dictionary import FILLER
from spectral_fairseq.embeddings import Table, TableSpec
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.heads import Head, HeadSpec
from spectral_fairseq.heads.head import SOFTCAP
from spectral_fairseq.options import Option, arguments, flags_by_argument
from spectral_fairseq.plugin.counts import counts_for_new_table
from spectral_fairseq.plugin.models.registry import head_kind, table_kind

# What the optimiser does with the output table; plugin/trainer/groups.py reads them.
TABLE_LR_SCALE = Option(
    "table_lr_scale",
    1.0,
    "factor on the learning rate of the output table and of what shares it, with any kind of table "
    "and any optimiser",
    above=0,
)
TABLE_WEIGHT_DECAY = Option(
    "table_weight_decay",
    None,
    "weight decay of the output table and of what shares it; that of the optimiser by default",
    type=Optional[float],
    at_least=0,
)


def uncounted_rows(dictionary: Any) -> List[int]:
    """Rows that stand for no word: padding, and fairseq's ``madeupword`` fillers."""
    # A dictionary cut by --output-dictionary-size still has the symbols beyond the cut.
    symbols = dictionary.symbols[: len(dictionary)]
    return [dictionary.pad()] + [
        index for index, symbol in enumerate(symbols) if symbol.startswith(FILLER)
    ]


def build_table(
    options: Any,
    dictionary: Any,
    dim: int,
    path: Optional[str] = None,
    init_range: Optional[float] = None,
) -> Table:
    """The table that ``--embedding-type`` names.

    Args:
        options: flags of :data:`SpectralOptions`.
        dictionary: fairseq dictionary.
        dim: d.
        path: file of pre-trained vectors, as for ``--encoder-embed-path``.
        init_range: r, if the architecture initialises its tables uniformly in [-r, r] rather than
            with fairseq's rows of norm 1.

    Raises:
        ConfigurationError: options outside their range, or fewer words than an SVD needs.
        DataError: a dictionary without the counts that a weight-norm table starts from.
    """
    kind = table_kind(options)
    flags = flags_by_argument(kind.options)
    flags["embedding_dim"] = "--encoder-embed-dim/--decoder-embed-dim"
    flags["PlainEmbedding"] = "--embedding-type plain"
    spec = TableSpec(
        num_embeddings=len(dictionary),
        embedding_dim=dim,
        padding_idx=dictionary.pad(),
        excluded_rows=uncounted_rows(dictionary),
        counts=counts_for_new_table(dictionary) if kind.starts_from_counts else None,
        init_range=init_range,
    )
    with arguments_as_flags(**flags):
        table = kind.build(spec, **arguments(kind.options, options))
    if path:
        # fairseq writes into ``weight.data``, which has no effect on a matrix that is computed.
        dense = nn.Embedding(len(dictionary), dim, _weight=table.weight.detach().clone())
        utils.load_embedding(utils.parse_embedding(path), dictionary, dense)
        table.load_state_dict(table.factor(dense.weight))
    return table


def build_head(
    options: Any,
    dictionary: Any,
    spec: HeadSpec,
    shared: Optional[Table] = None,
    kind: Optional[Type[Head]] = None,
) -> Head:
    """An output layer.

    Args:
        options: flags of :data:`SpectralOptions`, and those of ``kind``.
        dictionary: target dictionary.
        spec: what the head is for.
        shared: the look-up table to share; ``None`` makes a table as wide as the features.
        kind: class of the head; ``None`` is the one that ``--output-head`` names.

    Raises:
        ConfigurationError: a shared table of another width than the head needs, or options
            outside their range.
    """
    kind = head_kind(options) if kind is None else kind
    if options.logit_softcap is not None and SOFTCAP not in kind.options:
        raise refusals.SOFTCAP.error(kind.__name__)
    table = build_table(options, dictionary, spec.input_dim) if shared is None else shared
    if not kind.any_width and table.embedding_dim != spec.input_dim:
        raise ConfigurationError(
            "a shared table as wide as the decoder's output",
            f"a table of width {table.embedding_dim} and an output of width {spec.input_dim}",
            "Give --decoder-input-dim and --decoder-output-dim the same value, or do not share "
            "the embeddings.",
        )
    flags = flags_by_argument(kind.options)
    with arguments_as_flags(SoftmaxHead="--output-head softmax", **flags):
        return kind.build(table, spec, **arguments(kind.options, options))
