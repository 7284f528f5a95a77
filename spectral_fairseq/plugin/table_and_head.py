"""The flags of tables and heads, their checks, and what is built from them."""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from typing import Any, Iterable, List, Optional, Type, Union

from fairseq import utils
from fairseq.dataclass import FairseqDataclass
from torch import nn

from spectral_fairseq import refusals
from spectral_fairseq.checkpoints.dictionary import FILLER
from spectral_fairseq.checkpoints.settings import by_name
from spectral_fairseq.embeddings import TABLES, PlainEmbedding, SVDEmbedding, Table, TableSpec
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags, check_alike
from spectral_fairseq.heads import HEADS, Head, HeadSpec, SoftmaxHead
from spectral_fairseq.heads.head import SOFTCAP
from spectral_fairseq.options import Option, arguments, flags_by_argument, idle_flags
from spectral_fairseq.plugin.counts import counts_for_new_table
from spectral_fairseq.plugin.registry import with_options

logger = logging.getLogger(__name__)

EMBEDDING_TABLES = ("output", "all")


def _options_of(flag: str, kinds: Iterable[Union[Type[Table], Type[Head]]]) -> List[Option]:
    """The options of any of the kinds that a flag names, each once if several kinds share it."""
    options = {entry.name: entry for kind in kinds for entry in kind.options}
    return [
        dataclasses.replace(
            entry, needs=tuple(f"{flag} {kind.kind}" for kind in kinds if entry in kind.options)
        )
        # The criterions read the prior of a table that is no SVD table.
        if entry not in SVDEmbedding.options
        else entry
        for entry in options.values()
    ]


def _one_of(kinds: Iterable[Union[Type[Table], Type[Head]]]) -> str:
    *others, last = (kind.summary for kind in kinds)
    return f"{', '.join(others)}, or {last}"


EMBEDDING_TYPE = Option(
    "embedding_type",
    TABLES[0].kind,
    f"parameterisation of the embedding table: {_one_of(TABLES)}",
    choices=[kind.kind for kind in TABLES],
)
OUTPUT_HEAD = Option(
    "output_head",
    HEADS[0].kind,
    f"output layer of the decoder: {_one_of(HEADS)}",
    choices=[kind.kind for kind in HEADS],
)
OPTIONS = (
    EMBEDDING_TYPE,
    Option(
        "embedding_tables",
        EMBEDDING_TABLES[0],
        "which tables --embedding-type applies to: the one that the softmax uses, with "
        "whatever shares it, or all of them",
        choices=EMBEDDING_TABLES,
        needs=tuple(
            f"{EMBEDDING_TYPE.flag} {kind.kind}" for kind in TABLES if kind is not PlainEmbedding
        ),
    ),
    *_options_of(EMBEDDING_TYPE.flag, TABLES),
    OUTPUT_HEAD,
    *_options_of(OUTPUT_HEAD.flag, HEADS),
)
SpectralOptions: Any = with_options(
    FairseqDataclass,
    "SpectralOptions",
    OPTIONS,
    "The options of all tables and heads; an architecture is a preset of them.",
)
# Measured in trained models: docs/evidence.md. The paper's 0.5 is for LSTMs.
IN_A_TRANSFORMER = {"weight_norm_init_sigma": 0.1}


def table_kind(options: Any) -> Type[Table]:
    """The class of the table that ``--embedding-type`` names."""
    return {kind.kind: kind for kind in TABLES}[str(options.embedding_type)]


def head_kind(options: Any) -> Type[Head]:
    """The class of the output layer that ``--output-head`` names."""
    return {kind.kind: kind for kind in HEADS}[str(options.output_head)]


def has_own_output(options: Any) -> bool:
    """Whether the output layer is one of this package's rather than fairseq's own."""
    usual = table_kind(options) is PlainEmbedding and head_kind(options) is SoftmaxHead
    return not usual or options.logit_softcap is not None


def has_own_look_up(options: Any, shared: bool) -> bool:
    """Whether a look-up takes a table of this package, by ``--embedding-tables``.

    Args:
        options: flags of :data:`SpectralOptions`.
        shared: whether the output layer shares that table.
    """
    return has_own_output(options) and (shared or str(options.embedding_tables) == "all")


def warn_of_idle_options(model: Any, config: Any) -> None:
    """Warn of options that were given and that the chosen table and head do not have.

    Args:
        model: one whose class is an architecture of this package, or of fairseq, which has none.
        config: the model's settings; under hydra only those that the user wrote.
    """
    preset = getattr(model, "config", None)
    if preset is None:
        return
    defaults = preset()
    flags = by_name(config)
    given = {name: flags[name] for name in vars(defaults) if name in flags}
    options = Namespace(**vars(defaults))
    vars(options).update((name, value) for name, value in given.items() if value is not None)
    facts = {
        f"{flag} {kind.kind}": kind is chosen
        for flag, kinds, chosen in (
            (EMBEDDING_TYPE.flag, TABLES, table_kind(options)),
            (OUTPUT_HEAD.flag, HEADS, head_kind(options)),
        )
        for kind in kinds
    }
    for flag, needed in idle_flags(OPTIONS, options, defaults, facts).items():
        logger.warning("%s has no effect without %s", flag, needed)


def refuse_unsupported(options: Any) -> None:
    """Refuse what this package's tables and heads cannot be combined with.

    Raises:
        UnsupportedError: quantisation noise, adaptive input or softmax, or character embeddings.
    """
    if has_own_output(options):
        chosen = f"--embedding-type {options.embedding_type} --output-head {options.output_head}"
        if options.logit_softcap is not None:
            chosen += f" {SOFTCAP.flag} {options.logit_softcap:g}"
        refusals.OTHER_TABLES.check(Namespace(model=options), chosen)


def check_sharing(options: Any, task: Any) -> None:
    """Refuse tables that are to be shared but cannot, as fairseq does without saying what to do.

    Raises:
        ConfigurationError: two dictionaries, two widths or two files of vectors for one table.
    """
    widths = {"--decoder-embed-dim": options.decoder_embed_dim}
    if options.share_all_embeddings:
        widths["--encoder-embed-dim"] = options.encoder_embed_dim
        if task.source_dictionary != task.target_dictionary:
            sizes = f"{len(task.source_dictionary)} and {len(task.target_dictionary)} other words"
            remedy = (
                "Use fairseq-preprocess --joined-dictionary, or share the decoder's tables alone."
            )
            raise ConfigurationError("one dictionary for --share-all-embeddings", sizes, remedy)
        files = (options.encoder_embed_path, options.decoder_embed_path)
        if files[1]:
            what = "the same file of vectors for both sides with --share-all-embeddings"
            paths = {"--decoder-embed-path": files[1], "--encoder-embed-path": files[0]}
            check_alike(what, paths, "Give both, alike, or drop --decoder-embed-path.")
    if options.share_all_embeddings or options.share_decoder_input_output_embed:
        if getattr(options, "decoder_out_embed_dim", None) is not None:
            widths["--decoder-out-embed-dim"] = options.decoder_out_embed_dim
    remedy = "Make them equal, or do not share the embeddings."
    check_alike("one width for the shared embedding table", widths, remedy)


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
        table.load_state_dict(table.factor_exactly(dense.weight, path))
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
    if not kind.any_width:
        widths = {
            "the width of the table": table.embedding_dim,
            "--decoder-output-dim": spec.input_dim,
        }
        remedy = "Give --decoder-input-dim the same value, or do not share the embeddings."
        check_alike("a shared table as wide as the decoder's output", widths, remedy)
    flags = flags_by_argument(kind.options)
    with arguments_as_flags(SoftmaxHead="--output-head softmax", **flags):
        return kind.build(table, spec, **arguments(kind.options, options))
