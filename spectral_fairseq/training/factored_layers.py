"""Layers that compute with the factors of a table, put on a model and taken off.

The layers that share the output table of a model are the look-ups of GPT-2, Llama, T5 and Marian,
and the output layer tied to them. One of them owns the new table under the name ``table``, the
others refer to it, so all uses see the same matrix and stay tied. Checkpoints hold the entries of
the table, such as ``transformer.wte.table.g``, from which training goes on exactly.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.embeddings.table import FactoredEmbedding
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.functional.settings import new_tensors_on
from spectral_fairseq.training.adapters import with_adapters
from spectral_fairseq.training.computed_weight import read_alone
from spectral_fairseq.training.joining import dense_from, joined
from spectral_fairseq.training.layer_mixins import (
    LayerMixin,
    forward_of,
    put_on,
    refuse_replicas,
    take_off,
)
from spectral_fairseq.training.optimizer_watch import refuse_optimizers_of, watch_decay_of
from spectral_fairseq.training.output_layer import output_layer, sharded
from spectral_fairseq.training.replaced_methods import keep_layers
from spectral_fairseq.training.table_checks import (
    PASS_WHOLE,
    Uses,
    check_not_sharded,
    uses_of_table,
)

AnyTable = TypeVar("AnyTable", bound=FactoredEmbedding)


class FactoredLayer(LayerMixin):
    """A layer whose ``weight`` is the matrix of a table, computed at each use."""

    fixed = ("weight", "num_embeddings", "embedding_dim", "in_features", "out_features")
    order = 2
    computes_weight = True
    _replicate_for_data_parallel = refuse_replicas  # layers refer to the table of another one

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


def put_table_on(model: nn.Module, make: Callable[[Uses], AnyTable], use: str) -> AnyTable:
    """Put a new table on every layer that shares the output table of a model.

    Args:
        model: as for :func:`~spectral_fairseq.training.tables.weight_norm_`.
        make: makes the table for its uses; it may refuse.
        use: the name of the caller, for messages.

    Returns:
        The new table.

    Raises:
        UnsupportedError: a layer has another part called ``table``; or as ``make`` and
            :func:`~spectral_fairseq.training.table_checks.uses_of_table` refuse.
    """
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
    refuse_optimizers_of([uses.weight], use)
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
    users: Dict[FactoredEmbedding, List[FactoredLayer]] = {}
    for layer in model.modules():
        if isinstance(layer, FactoredLayer):
            users.setdefault(layer.used_table, []).append(layer)
    for table, layers in users.items():
        if len(layers) != table.__dict__["uses"]:
            wanted = f"the {table.__dict__['uses']} layers that share a table"
            found = f"{len(layers)} of them in {type(model).__name__}"
            raise ConfigurationError(wanted, found, PASS_WHOLE)
        dense = table.dense().detach().clone()
        trained = any(entry.requires_grad for entry in table.parameters())
        plain = nn.Parameter(dense, requires_grad=trained)
        for layer in layers:
            take_off(layer, FactoredLayer)
            del layer.__dict__["_used_table"]
            layer._parameters["weight"] = plain
            layer._modules.pop("table", None)
        refuse_optimizers_of(table.parameters(), "plain_")


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


def entries_of(layer: nn.Module) -> Tuple[Tensor, ...]:
    """What an output layer computes with: its parameters, and those of a table of another layer."""
    others = layer.stored_table.parameters() if isinstance(layer, FactoredLayer) else ()
    return (*layer.parameters(), *others)


def operands(layer: nn.Module, features: Tensor) -> Tuple[Tensor, Tensor]:
    """(x, M) such that x M' are the logits of features, without the bias."""
    if isinstance(layer, FactoredLayer):
        return layer.used_table.operands(features)
    weight: Any = layer.weight
    return features, with_adapters(layer, weight)
