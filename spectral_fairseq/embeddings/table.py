"""The base class of embedding tables, and what each kind of table declares.

Flags: ``--embedding-type`` plain, ``--embedding-tables`` output.
In order: ``plugin/table_and_head.py: table_kind``, ``Table.build``, ``Table.operands``.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
import numbers
from typing import (
    Any,
    Callable,
    ClassVar,
    Dict,
    FrozenSet,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
)

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.errors import CheckpointError, ConfigurationError, check_shape, plainly
from spectral_fairseq.functional.autograd import row_without_gradient
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.products import linear
from spectral_fairseq.functional.row_blocks import BLOCK_ROWS, check_finite
from spectral_fairseq.options import Option

# Largest squared relative error at which a table counts as equal to a matrix.
_LARGEST_ERROR = 1e-10
AnyTable = TypeVar("AnyTable", bound="Table")


class TableSpec(NamedTuple):
    """What a table is built for, whatever its kind.

    Attributes:
        num_embeddings: N, all rows of the dictionary.
        embedding_dim: d.
        padding_idx: row of the padding symbol.
        excluded_rows: further rows that stand for no word (``madeupword0000``).
        counts: how often each row's word occurs, shape (N,).
        init_range: r, if the architecture initialises its tables uniformly in [-r, r]; ``None``
            stands for fairseq's rows of norm about 1.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int
    excluded_rows: Sequence[int] = ()
    counts: Optional[Sequence[float]] = None
    init_range: Optional[float] = None


class FactorMeasures(NamedTuple):
    """What the stored entries of a table tell beyond the matrix that they stand for.

    Attributes:
        orthogonality: distances of factors from orthonormal columns, by the name of the measure.
        stored_sigma: singular values as learned, in absolute value, largest first, shape (d,).
        initial_norm: Frobenius norm that an automatic prior refers to.
    """

    orthogonality: Dict[str, float]
    stored_sigma: Optional[Tensor]
    initial_norm: Optional[float]


def counted_from_start(row: Any, num_embeddings: int) -> int:
    """The index from 0 of a row, which may be counted from the end as in ``nn.Embedding``.

    Args:
        row: from -N to N - 1.
        num_embeddings: N.

    Raises:
        ConfigurationError: there is no such row.
    """
    rows = range(-num_embeddings, num_embeddings)
    if not isinstance(row, numbers.Integral) or int(row) not in rows:
        raise ConfigurationError(
            f"`padding_idx` and `excluded_rows` to be rows of a table of {num_embeddings} rows",
            plainly(row),
            f"Give numbers from {-num_embeddings} to {num_embeddings - 1}; a table of this package "
            "has a row of padding.",
        )
    return int(row) % num_embeddings


class Table(nn.Module):
    """Base class of embedding tables W of N words and d dimensions.

    A table is at once a look-up (``forward``: tokens of any shape to vectors, shape (*, d)) and
    the matrix of an output layer (:meth:`project`). A subclass declares everything that the rest
    of the package knows about its kind.

    Class attributes:
        kind: name of the kind, one of the choices of ``embedding_type``.
        summary: what the kind stores, in a few words.
        options: arguments that users choose; :meth:`chosen_options` gives them back.
        entries: names of its tensors in a checkpoint; the first one is a matrix, of shape (N, d)
            unless :meth:`stored_shape` says otherwise.
        numbers: those of ``entries`` that are one number, not below zero.
        settings: those of ``entries`` that record how the table is trained and do not follow from
            the matrix.
        undecayed: names of parameters that weight decay should leave alone, because W is linear in
            another parameter, whose decay is that of W.
        starts_from_counts: whether a new table depends on how often the words occur.
        exact: whether :meth:`factor` gives any matrix to float precision. Where it only comes near
            to some of them, these are refused rather than replaced in silence.

    A kind whose :attr:`options` change the shapes of its entries declares :meth:`stored_shape` and
    :meth:`rebuilt`, by which files are read, exported and averaged.

    Attributes:
        num_embeddings: N, all rows of the dictionary.
        embedding_dim: d.
        padding_idx: row of the padding symbol, if there is one.
        excluded_rows: rows that penalties and measures leave out, the padding row among them.
        excluded: the same as numbers, which a table on the device meta has too.
        weight: W, shape (N, d).
    """

    kind: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[Tuple[Option, ...]] = ()
    entries: ClassVar[Tuple[str, ...]]
    numbers: ClassVar[Tuple[str, ...]] = ()
    settings: ClassVar[FrozenSet[str]] = frozenset()
    undecayed: ClassVar[Tuple[str, ...]] = ()
    starts_from_counts: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    num_embeddings: int
    embedding_dim: int
    padding_idx: Optional[int]
    excluded_rows: Tensor
    excluded: List[int]
    weight: Tensor

    @classmethod
    def build(cls, spec: TableSpec, **options: Any) -> "Table":
        """A new table.

        Args:
            spec: what the table is for.
            **options: the arguments that :attr:`options` declares.
        """
        raise NotImplementedError

    @classmethod
    def from_dense(
        cls: Type[AnyTable], weight: Tensor, padding_idx: int, **options: Any
    ) -> AnyTable:
        """The table that equals a dense one to float precision.

        Args:
            weight: W, shape (N, d), of any floating dtype. The table has torch's default dtype.
            padding_idx: as for the constructor.
            **options: the constructor's other arguments.
        """
        table = cls(weight.size(0), weight.size(1), padding_idx, **options)
        table.load_state_dict(table.factor_exactly(widened(weight), "the matrix"))
        return table

    def chosen_options(self) -> Dict[str, Any]:
        """The values of :attr:`options`, by their arguments, from which an equal table is made.

        They are attributes of these names, unless a kind says otherwise.
        """
        return {entry.argument: getattr(self, entry.argument) for entry in self.options}

    def vectors(self, words: Tensor) -> Tensor:
        """The vectors of ``words`` for the softmax: a look-up without the hooks of look-ups."""
        return self.forward(words)

    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict with which this table equals a dense one; deterministic.

        Args:
            weight: W, shape (N, d), float32 or float64: factors of 16 bits would multiply to
                another matrix.

        Returns:
            A tensor for each of :attr:`entries`, in the dtype of ``weight``.

        Raises:
            DataError: infinity or NaN in ``weight``.
        """
        raise NotImplementedError

    @classmethod
    def stored_shape(cls, entries: Mapping[str, Tensor]) -> Tuple[int, int]:
        """(N, d) of the matrix that a checkpoint's entries stand for: that of the first entry.

        Args:
            entries: a tensor for each of :attr:`entries`, the first of which is a matrix.
        """
        rows, dim = entries[cls.entries[0]].shape
        return rows, dim

    @classmethod
    def rebuilt(cls: Type[AnyTable], entries: Mapping[str, Tensor], padding_idx: int) -> AnyTable:
        """A new table that stores entries of the same shapes.

        Args:
            entries: a tensor for each of :attr:`entries`.
            padding_idx: as for the constructor.
        """
        return cls(*cls.stored_shape(entries), padding_idx)

    def factor_exactly(self, weight: Tensor, name: str) -> Dict[str, Tensor]:
        """:meth:`factor` of a matrix, shape (N, d), that this table can equal.

        Raises:
            CheckpointError: the kind is not :attr:`exact`, and only comes near.
            DataError: infinity or NaN in ``weight``.
        """
        entries = self.factor(weight)
        if not self.exact:
            rows = torch.arange(len(weight), device=weight.device)
            resolved = self.resolved(entries)
            apart = sum(
                float((self.dense_rows(resolved, some, weight.dtype) - weight[some]).square().sum())
                for some in rows.split(BLOCK_ROWS)
            )
            if apart > _LARGEST_ERROR * float(weight.square().sum()):
                share = (apart / float(weight.square().sum())) ** 0.5
                raise CheckpointError(
                    f"{name} to equal a {self.kind} table",
                    f"a matrix of which the nearest one is {share:.0%} of its norm away",
                    "Use a kind of table that equals any matrix, such as a plain one.",
                )
        return entries

    @classmethod
    def resolved(cls, entries: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What :meth:`dense_rows` takes in the place of entries, to compute block after block.

        A kind whose rows share what takes a pass over the table computes it here.

        Args:
            entries: a tensor for each of :attr:`entries`, of any floating type.
        """
        return entries

    @classmethod
    def dense_rows(cls, entries: Mapping[str, Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix that a checkpoint's entries stand for.

        Args:
            entries: a tensor for each of :attr:`entries`, of any floating type; or what
                :meth:`resolved` returned for them.
            rows: which rows, shape (n,).
            dtype: of the arithmetic and the result.

        Returns:
            Shape (n, d).
        """
        raise NotImplementedError

    @classmethod
    def measure_factors(cls, entries: Mapping[str, Tensor], excluded: Tensor) -> FactorMeasures:
        """What a checkpoint's entries tell beyond their matrix; nothing by default.

        Args:
            entries: a tensor for each of :attr:`entries`.
            excluded: rows that are not counted, shape (m,).
        """
        del entries, excluded
        return FactorMeasures({}, None, None)

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """(x, M) such that x M' are the logits W h of ``features`` h, shape (*, d).

        Losses multiply them block by block.
        """
        raise NotImplementedError

    def project(self, features: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """Logits W h + b of ``features`` h, shape (*, d), and ``bias`` b, shape (N,).

        Returns:
            Shape (*, N).
        """
        rows, matrix = self.operands(features)
        return linear(rows, matrix, bias)

    def reset_parameters(self) -> None:
        """Start anew, as the constructor does; one that starts from counts is given them again."""
        raise NotImplementedError

    def _exclude(self, padding: Sequence[int], excluded_rows: Sequence[int]) -> None:
        """Set ``padding_idx``, if any, and ``excluded_rows``; ``num_embeddings`` is set before."""
        rows = [counted_from_start(row, self.num_embeddings) for row in (*padding, *excluded_rows)]
        self.padding_idx = rows[0] if padding else None
        self.excluded = sorted(set(rows))
        excluded = torch.tensor(self.excluded, dtype=torch.long)
        self.register_buffer("excluded_rows", excluded, persistent=False)

    def _apply(
        self: AnyTable, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> AnyTable:
        # A table that was built on the meta device has no values, and ``to_empty`` gives it any. No
        # checkpoint holds those of constant buffers.
        super()._apply(fn, *args, **kwargs)
        self._renew_constants()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # With assign=True other parameters take the place of those on the meta device.
        super()._load_from_state_dict(*args, **kwargs)
        self._renew_constants()

    def _renew_constants(self) -> None:
        # No training could go on with tensors of inference, as an average's weights are loaded in.
        with torch.inference_mode(False):
            self._fill_constants()

    def _device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def _fill_constants(self) -> None:
        """Give the buffers that no checkpoint holds their values, where the parameters are."""
        self.excluded_rows = torch.tensor(self.excluded, dtype=torch.long, device=self._device())


class FactoredEmbedding(Table):
    """Base class of tables that store factors of W instead of W.

    Args:
        num_embeddings: N, all rows of the dictionary.
        embedding_dim: d.
        padding_idx: row that starts at zero and never receives a gradient, neither from the
            look-up nor from the softmax; a negative number counts from the end. ``None`` leaves it
            out, as in models whose own tables train its row.
        excluded_rows: further rows that penalties and measures leave out (``madeupword0000``).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int],
        excluded_rows: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self._exclude(() if padding_idx is None else (padding_idx,), excluded_rows)

    def dense(self) -> Tensor:
        """The matrix W, shape (N, d), differentiable, computed anew at each call."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """As :meth:`dense`, under the name that a plain table has for its matrix."""
        return self.dense()

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Turn a plain checkpoint's table into factors, in place; fairseq calls this.

        It is called once for each name of a shared table. The factorisation is deterministic, so
        that all of them receive the same factors.

        Raises:
            ConfigurationError: the checkpoint's table has another shape.
            CheckpointError: it holds infinity or NaN, so that it has no factors.
        """
        weight = state_dict.pop(f"{name}.weight", None)
        if weight is None or any(f"{name}.{entry}" in state_dict for entry in self.entries):
            return
        shape = (self.num_embeddings, self.embedding_dim)
        remedy = "Use the dictionary and the embedding dimension of that checkpoint."
        check_shape(f"{name}.weight of the checkpoint", weight, shape, remedy)
        check_finite(weight, f"{name}.weight of the checkpoint", CheckpointError)
        made = self.factor_exactly(widened(weight), f"{name}.weight of the checkpoint")
        for key, value in made.items():
            state_dict[f"{name}.{key}"] = value

    def _without_padding(self, values: Tensor) -> Tensor:
        """``values``, shape (N, *), of which the padding row receives no gradient.

        A kind calls it for what its softmax is computed from; the look-up leaves the row out by
        itself. A hook of the parameter would be lost where ``fully_shard`` or
        ``torch.func.functional_call`` puts another tensor in its place.
        """
        row = self.padding_idx
        if row is None or not torch.is_grad_enabled():
            return values
        return row_without_gradient(values, row)


class PlainEmbedding(nn.Embedding, Table):
    """``nn.Embedding`` that is also the matrix of an output layer, with the same checkpoints.

    Args:
        num_embeddings: N.
        embedding_dim: d.
        padding_idx: row that starts at zero.
        excluded_rows: further rows that penalties and measures leave out.
        init_range: r; the entries start uniformly in [-r, r]. ``None`` draws them from N(0, 1/d),
            which gives rows of norm about 1, as fairseq does.
    """

    kind = "plain"
    summary = "a plain matrix"
    entries = ("weight",)

    padding_idx: int
    init_range: Optional[float] = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int,
        excluded_rows: Sequence[int] = (),
        *,
        init_range: Optional[float] = None,
    ) -> None:
        row = counted_from_start(padding_idx, num_embeddings)
        super().__init__(num_embeddings, embedding_dim, padding_idx=row)  # draws once
        self._exclude((row,), excluded_rows)
        self.init_range = init_range
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the entries anew, as the constructor does."""
        nn.init.normal_(self.weight, mean=0, std=self.embedding_dim**-0.5)
        if self.init_range is not None:
            nn.init.uniform_(self.weight, -self.init_range, self.init_range)
        nn.init.zeros_(self.weight[self.padding_idx])

    @classmethod
    def build(cls, spec: TableSpec, **options: Any) -> "PlainEmbedding":
        """A new table with the architecture's initialisation."""
        return cls(*spec[:4], init_range=spec.init_range, **options)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: Any = None, **options: Any
    ) -> "PlainEmbedding":
        """:meth:`from_dense` by the arguments of ``nn.Embedding``, frozen unless told otherwise.

        Raises:
            ConfigurationError: ``padding_idx`` is left out, or no row.
        """
        return cls.from_dense(embeddings, padding_idx, **options).requires_grad_(not freeze)

    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict with which this table equals ``weight``, shape (N, d)."""
        return {"weight": weight.detach()}

    @classmethod
    def dense_rows(cls, entries: Mapping[str, Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """``rows`` of the stored matrix, shape (n, d)."""
        return entries["weight"][rows].to(dtype)

    def vectors(self, words: Tensor) -> Tensor:
        """The vectors of ``words``, with a gradient for that of padding, as the softmax has it."""
        return F.embedding(words, self.weight)

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """(h, W) of ``features`` h, shape (*, d)."""
        return features, self.weight
