"""Other kinds of tables on a model that exists.

``weight_norm_(model)`` and ``factor_(model)`` find the output table and every layer that shares it:
the look-ups of GPT-2, Llama, T5 and Marian, and the output layer tied to them. One of them owns the
new table (:mod:`spectral_fairseq.embeddings`) under the name ``table``, the others refer to it, so
all uses see the same matrix and stay tied. Checkpoints hold the entries of the table, such as
``transformer.wte.table.g``, from which training goes on exactly. ``plain_(model)`` puts a plain
parameter back; then the model saves in its own format.
"""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.embeddings.table import FactoredEmbedding
from spectral_fairseq.errors import (
    ConfigurationError,
    DataError,
    UnsupportedError,
)
from spectral_fairseq.functional.looks_trained import looks_trained
from spectral_fairseq.functional.row_blocks import check_finite
from spectral_fairseq.functional.settings import new_tensors_on
from spectral_fairseq.functional.spectrum_penalty import check_rank
from spectral_fairseq.functional.word_counts import fault_of_counts
from spectral_fairseq.training.computed_weight import read_alone
from spectral_fairseq.training.decay_watch import watch_decay_of
from spectral_fairseq.training.joining import dense_from, joined
from spectral_fairseq.training.layer_mixins import LayerMixin, forward_of, put_on, take_off
from spectral_fairseq.training.output_layer import output_layer, sharded
from spectral_fairseq.training.replaced_methods import keep_layers
from spectral_fairseq.training.table_checks import (
    PASS_WHOLE,
    Uses,
    check_has_values,
    check_not_sharded,
    uses_of_table,
)

AnyTable = TypeVar("AnyTable", bound=FactoredEmbedding)


class FactoredLayer(LayerMixin):
    """A layer whose ``weight`` is the matrix of a table, computed at each use."""

    fixed = ("weight", "num_embeddings", "embedding_dim", "in_features", "out_features")
    order = 2
    computes_weight = True

    @property
    def stored_table(self) -> FactoredEmbedding:
        """The table, which this layer or another one owns, wherever its entries are."""
        # A tuple, so that the table is a part of its owner alone.
        table: FactoredEmbedding = self.__dict__["_used_table"][0]
        return table

    @property
    def used_table(self) -> FactoredEmbedding:
        """The table, to compute with it.

        Raises:
            UnsupportedError: its entries are split over devices at this moment.
        """
        table = self.stored_table
        for entry in table.parameters():
            check_not_sharded(entry)
        return table

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W, shape (N, d), differentiable, which refuses to be written to."""
        return read_alone(self.used_table.dense())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[Tuple[str, nn.Parameter]]:
        """Those of the table too where another layer owns it, as a plain tied layer has them."""
        # torch 1.12 always leaves duplicates out.
        options: Any = {} if remove_duplicate else {"remove_duplicate": False}
        yield from super().named_parameters(prefix, recurse, **options)
        if recurse and "table" not in self._modules:
            at = f"{prefix}.table".lstrip(".")
            yield from self.stored_table.named_parameters(at, **options)

    def requires_grad_(self, requires_grad: bool = True) -> FactoredLayer:
        """Freeze or train the table, for all layers that share it, and what else is here."""
        self.stored_table.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def register_parameter(self, name: str, param: Optional[nn.Parameter]) -> None:
        """Refuse the entries of the table under names of this layer.

        Raises:
            UnsupportedError: tensor parallelism splits the layer by its parameters.
        """
        if name.startswith("table."):
            raise sharded("an output layer that tensor parallelism splits, with a table on it")
        super().register_parameter(name, param)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Tell of the table of a model that was copied or unpickled."""
        super().__setstate__(state)
        table = self.stored_table
        if isinstance(table, SVDEmbedding):
            watch_decay_of(table)

    def recorded(self) -> Dict[str, Any]:
        """The kind of the table and its options."""
        table: Any = self.stored_table
        settings = {"kind": table.kind, **table.chosen_options()}
        return {**super().recorded(), "table": settings}

    def plain_entries(self, dense: Callable[[Any], Tensor]) -> Dict[str, Tensor]:
        """W, the same tensor for all layers that share it."""
        return {"weight": dense(self.stored_table)}


def entries_of(layer: nn.Module) -> Tuple[Tensor, ...]:
    """What an output layer computes with: its parameters, and those of a table of another layer."""
    others = layer.stored_table.parameters() if isinstance(layer, FactoredLayer) else ()
    return (*layer.parameters(), *others)


class FactoredLookUp(FactoredLayer):
    """An ``nn.Embedding`` that computes the rows that it is asked for."""

    def forward(self, input: Tensor) -> Tensor:
        """Vectors of tokens of any shape: shape (*, d)."""
        rows: Tensor = self.used_table(input)
        padding: Any = self.padding_idx
        if padding is None:
            return rows
        # As in nn.Embedding, the look-up alone gives this row no gradient.
        return torch.where(input.eq(padding).unsqueeze(-1), rows.detach(), rows)


class FactoredLinear(FactoredLayer):
    """An ``nn.Linear`` that multiplies by the factors of a table."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits of features, shape (*, d): shape (*, N)."""
        bias: Any = self.bias
        return self.used_table.project(input, bias)


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
            padding = list(uses.padding)  # which keep their vectors, of no length usually
            with torch.no_grad():
                table.v.copy_(init_range * (dim / 3) ** 0.5 * directions)
                table.g[padding] = lengths[padding]
        return table

    return _put_table_on(model, make, "weight_norm_")


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

    table = _put_table_on(model, make, "factor_")
    watch_decay_of(table)
    return table


def _load(table: FactoredEmbedding, uses: Uses) -> None:
    table.to(device=uses.weight.device, dtype=uses.weight.dtype)
    if not uses.weight.is_meta:
        table.load_state_dict(table.factor_exactly(uses.weight, "the table"))


def _put_table_on(model: nn.Module, make: Callable[[Uses], AnyTable], use: str) -> AnyTable:
    uses = uses_of_table(model, use)
    # It may refuse: nothing has been changed so far. What it draws does not stay.
    device = "meta" if uses.weight.is_meta else "cpu"
    with torch.random.fork_rng(devices=[]), new_tensors_on(device):
        table = make(uses)
    owner = next(iter(uses.layers.values()))
    if hasattr(owner, "table"):
        wanted = f"a layer without an attribute `table`, for {use}"
        found = f"a {type(owner).__name__} that has one"
        raise UnsupportedError(wanted, found, "Use a plain table for this model.")
    owner.table = table.train(owner.training)
    # Before a mixture, in whatever order they are put on: an optimiser's state is by this order.
    for name in [name for name in owner._modules if name != "table"]:
        owner._modules[name] = owner._modules.pop(name)
    for layer in uses.layers.values():
        layer._parameters["weight"] = None  # which keeps its place
        layer.__dict__["_used_table"] = (table,)
        put_on(layer, _kind_of_use(layer))
    table.__dict__["uses"] = len(uses.layers)
    keep_layers(model, tied=True)
    return table


def _kind_of_use(layer: nn.Module) -> Any:
    if forward_of(layer) is nn.Embedding.forward:
        return FactoredLookUp
    return FactoredLinear if forward_of(layer) is nn.Linear.forward else FactoredLayer


def take_tables_off(model: nn.Module) -> None:
    """Give the layers of a model their plain parameters back, tied as they were.

    Raises:
        ConfigurationError: a layer outside ``model`` uses the same table.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, FactoredLayer)]
    tables = {id(layer.used_table): layer.used_table for layer in layers}
    for key, table in tables.items():
        users = [layer for layer in layers if id(layer.used_table) == key]
        if len(users) != table.__dict__["uses"]:
            wanted = f"the {table.__dict__['uses']} layers that share a table"
            found = f"{len(users)} of them in {type(model).__name__}"
            raise ConfigurationError(wanted, found, PASS_WHOLE)
        first = next(iter(table.parameters()))
        dense = table.dense().detach().clone()
        plain = nn.Parameter(dense, requires_grad=first.requires_grad)
        for layer in users:
            take_off(layer, FactoredLayer)
            del layer.__dict__["_used_table"]
            layer._parameters["weight"] = plain
            layer._modules.pop("table", None)


def whole_weight(model: nn.Module) -> Tensor:
    """The output table as it is now, shape (N, d), also where ``fully_shard`` has split it.

    Every worker has to call this.

    Raises:
        ConfigurationError: there is no output layer.
    """
    layer: Any = output_layer(model)
    if not isinstance(layer, FactoredLayer):
        return joined(layer.weight)
    table = layer.stored_table
    return dense_from(table, {name: joined(one) for name, one in table.state_dict().items()})
