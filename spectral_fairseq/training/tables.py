"""Another kind of table for the output layer of a model that exists.

``weight_norm_(model)`` and ``factor_(model)`` change every layer that shares the output table
(:mod:`spectral_fairseq.training.factored_layers`). ``plain_(model)`` puts a plain parameter back;
then the model saves in its own format.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from torch import nn

from spectral_fairseq.embeddings import SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.embeddings.table import FactoredEmbedding
from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.looks_trained import looks_trained
from spectral_fairseq.functional.row_blocks import check_finite
from spectral_fairseq.functional.spectrum_penalty import check_rank
from spectral_fairseq.functional.word_counts import fault_of_counts
from spectral_fairseq.training.factored_layers import put_table_on
from spectral_fairseq.training.optimizer_watch import watch_decay_of
from spectral_fairseq.training.table_checks import Uses, check_has_values


def weight_norm_(
    model: nn.Module,
    counts: Optional[Sequence[float]] = None,
    *,
    sigma: float = 0.1,
    init_range: float = 0.1,
    replace_trained: bool = False,
    **options: Any,
) -> WeightNormEmbedding:
    """Store the output table of a model as lengths and directions, W_k = g_k v_k / ||v_k||.

    Args:
        model: a model of transformers or any other with an output layer; or one layer,
            ``Embedding`` or ``Linear``, that shares its table with no other. It is changed in
            place. Make the optimiser afterwards.
        counts: how often each word occurs in the training text, one number for each row: the
            lengths then start at sigma log(1 + max(c_k, 1)), the initialisation of Herold et al.,
            and the directions stay those of the model. ``None`` keeps the matrix.
            It is an initialisation, so a table that looks trained is refused
            (:func:`~spectral_fairseq.functional.looks_trained.looks_trained`).
        sigma: length of a vector per log count; 0.07 to 0.2 did well in Transformers.
        init_range: r; v starts with the mean length of vectors drawn uniformly from [-r, r].
        replace_trained: give a trained table new lengths from ``counts`` all the same, which
            changes what the model has learned.
        **options: ``gamma`` and ``tau`` of :class:`WeightNormEmbedding`.

    Returns:
        The new table.

    Raises:
        ConfigurationError: an option outside its range, no table that is trained, not one count for
            each row, a layer outside ``model`` shares the table, or ``counts`` for a table that has
            been trained already.
        DataError: no word is counted more than once.
        UnsupportedError: a table that is quantised, of 16 bits or split over devices; a layer that
            uses it in another way; an optimiser that has it already.
    """

    def make(uses: Uses) -> WeightNormEmbedding:
        if counts is not None:
            check_has_values(uses.weight, "lengths that start from `counts`")
            _check_start(uses, replace_trained)
        words, dim = uses.weight.shape
        counts_ = None if counts is None else _counted(counts)
        settings = {"sigma": sigma, "init_range": init_range, **options}
        table = WeightNormEmbedding(words, dim, None, uses.padding, counts=counts_, **settings)
        _load(table, uses)
        if counts_ is not None:
            lengths = table.g.detach().clone()
            directions = torch.nn.functional.normalize(table.v.detach(), dim=1)
            table.reset_parameters(counts_)
            with torch.no_grad():
                table.v.copy_(init_range * (dim / 3) ** 0.5 * directions)
                # Those of padding keep their vectors, of no length usually.
                table.g[uses.padding] = lengths[uses.padding]
        return table

    return put_table_on(model, make, "weight_norm_")


def _check_start(uses: Uses, replace_trained: bool) -> None:
    """Refuse to start a table anew that has been trained, unless that is asked for."""
    check_finite(uses.weight.detach(), "the table")
    padding = torch.tensor(uses.padding, dtype=torch.long)
    if not replace_trained and looks_trained(uses.weight, padding):
        raise ConfigurationError(
            "a table as an initialisation leaves it, for `counts` of weight_norm_",
            "one that looks trained: its rows differ in length, or share a direction, more than "
            "drawn ones do",
            "Leave `counts` out to keep the matrix; or pass replace_trained=True to train a new "
            "start from these directions.",
        )


def _counted(counts: Sequence[float]) -> Sequence[float]:
    """The counts as numbers, from a tensor or an array as well.

    Raises:
        DataError: no word is counted more than once, all are counted equally often, or a count is
            no count.
    """
    values: Any = counts.tolist() if hasattr(counts, "tolist") else counts
    try:
        numbers = [float(count) for count in values]
    except (TypeError, ValueError):
        raise DataError(
            "`counts` as a sequence of numbers, one for each row of the table",
            f"a {type(counts).__name__} of other things",
            "Flatten it, as torch.bincount(ids, minlength=len(tokenizer)) gives it.",
        ) from None
    fault = fault_of_counts(numbers)
    if fault:
        raise DataError(
            "`counts` of the words in the training text, finite numbers >= 0, some above 1",
            fault,
            "Count the ids of the tokenised training text, as with torch.bincount(ids, "
            "minlength=len(tokenizer)); or leave `counts` out.",
        )
    return numbers


def factor_(model: nn.Module, **options: Any) -> SVDEmbedding:
    """Store the output table of a model as its singular value decomposition, W = U diag(sigma) V'.

    The matrix stays the same to float32 precision. U and V stay near orthonormal with the penalties
    of :class:`~spectral_fairseq.training.penalties.TablePenalty`. Where there is a weight decay,
    make the optimiser from :func:`~spectral_fairseq.training.groups.parameter_groups`, so that it
    acts once.

    Args:
        model: as for :func:`weight_norm_`.
        **options: ``prior``, ``c1``, ``c2`` and ``gamma`` of :class:`SVDEmbedding`.

    Returns:
        The new table.

    Raises:
        ConfigurationError: fewer words than dimensions, or as for :func:`weight_norm_`.
        CheckpointError: a table of zeros.
        UnsupportedError: as for :func:`weight_norm_`.
    """

    def make(uses: Uses) -> SVDEmbedding:
        words, dim = uses.weight.shape
        otherwise = "use weight_norm_, or leave the table as it is"
        check_rank(words - len(uses.padding), dim, "factor_", otherwise)
        table = SVDEmbedding(words, dim, None, uses.padding, **options)
        _load(table, uses)
        return table

    table = put_table_on(model, make, "factor_")
    watch_decay_of(table)
    return table


def _load(table: FactoredEmbedding, uses: Uses) -> None:
    table.to(device=uses.weight.device, dtype=uses.weight.dtype)
    if not uses.weight.is_meta:
        table.load_state_dict(table.factor_exactly(uses.weight, "the table"))
