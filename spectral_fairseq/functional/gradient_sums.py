"""The gradients of contexts, table and bias that follow from those of the scores, block by block.

In order, of a loss that ``blocks.py`` cuts into blocks: ``GradientSums.add_block`` for each block,
``GradientSums.save`` in the forward pass, ``scaled_gradients`` in the backward pass.

Note [Gradients in the forward pass]
------------------------------------
The loss is a scalar, so the gradient of a block's scores is known as soon as its scores are, up
to the one factor that arrives from above. Each block is multiplied out to the gradients of
contexts, table and bias at once and then discarded. This takes three matrix products for each
block, where recomputation in the backward pass would need four. What is kept between the passes
has the size of the contexts and of the table. It is kept in float32 and is rounded to the dtype
of the parameters only after the factor from above is applied: under loss scaling that factor
keeps float16 gradients from vanishing. Of a single block of bfloat16 the softmax is kept instead
of the table's gradient, which the backward pass multiplies out (``TableSum``).

Note [Half precision]
---------------------
The gradients of a block's scores are rounded to the dtype of the products. In float16 numbers
below 6e-8 would vanish, and most probabilities are smaller. Where products of float16 have float32
results (``products.py``), the gradients are between -1 and 1, and are multiplied by 2^15
first, the largest power of two in the range of float16; the products are divided by it. What is
below 2e-12 vanishes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from spectral_fairseq.functional.precision import at_least_float32, widened
from spectral_fairseq.functional.products import (
    add_matmul_transposed_,
    has_wide_products,
    matmul_transposed,
    matmul_transposed_by_rows,
)
from spectral_fairseq.functional.row_blocks import cached_rows


class GradientForm(NamedTuple):
    """What makes the gradient of scores of their softmax p: weights p - hits [v = target].

    Attributes:
        targets: column of each row's target, shape (r,).
        weights: shape (r,), zero for rows that only fill a block up.
        hits: likewise.
    """

    targets: Tensor
    weights: Tensor
    hits: Tensor


class _SingleBlock(NamedTuple):
    """What is kept of a single block of bfloat16 in the place of the table's gradient.

    Attributes:
        scores: the gradient of the scores without the weights, shape (T, N); or ``None``.
        rows: contexts of the same type, shape (T, d).
        targets: of a :class:`GradientForm`; or ``None`` like the next two.
        weights: likewise.
        hits: likewise.
        of_all: what is added to every row, shape (d,).
    """

    scores: Optional[Tensor] = None
    rows: Optional[Tensor] = None
    targets: Optional[Tensor] = None
    weights: Optional[Tensor] = None
    hits: Optional[Tensor] = None
    of_all: Optional[Tensor] = None

    def gradient(self, factor: Optional[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the table's gradient times a factor, shape (N, d).

        The factor multiplies T rows, so that it takes no pass over N x d.
        """
        assert self.scores is not None and self.rows is not None
        weights = factor if self.weights is None else _scaled(self.weights, factor).unsqueeze(1)
        rows = self.rows if weights is None else _weighted(self.rows, weights)
        found = matmul_transposed_by_rows(self.scores.t(), rows.t(), dtype)
        words, sums = None, None
        if self.targets is not None and self.hits is not None:
            words, place = self.targets.unique(return_inverse=True)
            addends = _scaled(widened(self.rows) * -self.hits.unsqueeze(1), factor)
            sums = found[words].to(addends.dtype).index_add_(0, place, addends)
        if self.of_all is not None:
            of_all = _scaled(self.of_all, factor)
            sums = None if sums is None else sums + of_all
            for part in found.split(cached_rows(found.size(1))):
                part.add_(of_all)
        if words is not None and sums is not None:
            found[words] = sums.to(dtype)
        return found


class TableSum:
    """The sum of the gradients that the blocks of a batch have for the table.

    A processor rounds products of 16-bit numbers to 16 bits. That of a single block, over all
    words, is the whole sum, which nothing is gained by widening: what it is made of is kept, and
    the backward pass multiplies it out to the gradient itself.

    Args:
        matrix: W, shape (N, d).
        dtype: of the sum.
        single: whether there is one block.
    """

    def __init__(self, matrix: Tensor, dtype: torch.dtype, single: bool) -> None:
        self.shape, self.device, self.dtype = matrix.shape, matrix.device, dtype
        self.single = single
        self._sum: Optional[Tensor] = None
        self._block = _SingleBlock()

    def _whole(self) -> Tensor:
        """The wide sum, to change in place; zero before the first block."""
        if self._sum is None:
            self._sum = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self._sum

    def add(
        self,
        words: slice,
        scores: Tensor,
        rows: Tensor,
        alpha: float,
        form: Optional[GradientForm] = None,
    ) -> None:
        """Add alpha scores.t() @ rows, of the words, shapes (r, n) and (r, d).

        A form weighs the rows, and takes its hits times the rows from the sums of the targets,
        which are counted from the words. The first product of all words overwrites, which saves
        two passes over N x d.
        """
        assert self._block.scores is None, "a second block of a single one"
        first = self._sum is None and scores.size(1) == self.shape[0]
        is_rounded = rows.dtype == torch.bfloat16 and not has_wide_products(rows.dtype, rows.device)
        if first and self.single and is_rounded:
            self._block = _SingleBlock(scores, rows, *(form or ()))
            return
        if first:
            self._sum = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        total = self._whole()[words]
        weighted = rows if form is None else _weighted(rows, form.weights.unsqueeze(1))
        add_matmul_transposed_(total, scores.t(), weighted.t(), alpha, first)
        if form is not None:
            total.index_add_(0, form.targets, rows.to(self.dtype) * -form.hits.unsqueeze(1))

    def add_to_all(self, gradient: Tensor) -> None:
        """Add ``gradient``, shape (d,), to every row, after the last block."""
        if self._block.scores is None:
            self._whole().add_(gradient)
        else:
            self._block = self._block._replace(of_all=gradient)

    def kept(self) -> Tuple[Optional[Tensor], _SingleBlock]:
        """The sum, shape (N, d), or what is kept of a single block."""
        return None if self._block.scores is not None else self._whole(), self._block


FLOAT16_SCALE = 2.0**15


class GradientSums:
    """Sums of gradients in the accumulation dtype; ``None`` for those that are not needed.

    Args:
        contexts: shape (rows, d), one row for each softmax.
        matrix: W, shape (N, d).
        bias: b, shape (N,), or ``None``.
        dtype: of the sums.
        needed: which of the three gradients autograd asks for.
        single: whether all tokens are in one block; see :class:`TableSum`.

    Attributes:
        contexts: the sum of their gradients.
        matrix: likewise.
        bias: likewise.
    """

    def __init__(
        self,
        contexts: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        dtype: torch.dtype,
        needed: Tuple[bool, bool, bool],
        single: bool = False,
    ) -> None:
        def total(of: Optional[Tensor], needs: bool) -> Optional[Tensor]:
            if of is None or not needs:
                return None
            return torch.zeros(of.shape, dtype=dtype, device=of.device)

        self.contexts, self.bias = total(contexts, needed[0]), total(bias, needed[2])
        self.matrix = TableSum(matrix, dtype, single) if needed[1] else None
        self.dtype = dtype
        self.dtypes = (contexts.dtype, matrix.dtype, None if bias is None else bias.dtype)

    def results(self) -> Tuple[Optional[Tensor], ...]:
        """Return the gradients of contexts, table and bias, in the types of these."""
        return _scaled_in_types(self._saved(), self.dtypes)

    def _saved(self, *others: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        """The gradients and the others, then what is kept of a single block."""
        matrix, block = (None, _SingleBlock()) if self.matrix is None else self.matrix.kept()
        return (self.contexts, matrix, self.bias, *others, *block)

    def add_block(
        self,
        place: Union[slice, Tensor],
        rows: Tensor,
        scores: Tensor,
        table: Tensor,
        form: Optional[GradientForm] = None,
        first_word: int = 0,
    ) -> None:
        """Add the gradients that follow from those of the scores of a block.

        The factors of each row in ``form`` are applied to tensors of d columns instead of N.

        Args:
            place: where the rows of the block belong in ``contexts``: a slice, if each row occurs
                in one block only, or distinct indices. Rows of the block beyond its end are
                padding and contribute zero; their gradients, weights and hits have to be zero.
            rows: contexts of the block, shape (r, d), in the dtype of the products.
            scores: d loss / d s, shape (r, n), or the softmax p with ``form``. It is overwritten.
            table: rows of W for the n words, shape (n, d), in the dtype of the products.
            form: what makes d loss / d s of p.
            first_word: index in W of the first column.
        """
        if self.contexts is None and self.matrix is None and self.bias is None:
            return
        dtype = self.dtype
        words = slice(first_word, first_word + table.size(0))
        if self.bias is not None:
            bias_sum = self.bias[words]
            if form is None:
                bias_sum += scores.sum(0)
            else:
                bias_sum += torch.mv(scores.t(), form.weights)
                bias_sum.index_add_(0, form.targets, -form.hits)
        # See Note [Half precision].
        scale = FLOAT16_SCALE if rows.dtype == torch.float16 else 1.0
        if scale != 1.0:
            scores.mul_(scale)
        narrow = scores.to(rows.dtype)
        if self.contexts is not None:
            gradient = matmul_transposed(narrow, table.t()).to(dtype)  # [r, d]
            if scale != 1.0:
                gradient.div_(scale)
            if form is not None:
                gradient.mul_(form.weights.unsqueeze(1))
                gradient.addcmul_(table[form.targets].to(dtype), form.hits.unsqueeze(1), value=-1)
            if isinstance(place, slice):
                context_sum = self.contexts[place]
                context_sum.copy_(gradient[: context_sum.size(0)])
            else:
                self.contexts.index_add_(0, place, gradient[: place.size(0)])
        if self.matrix is not None:
            self.matrix.add(words, narrow, rows, 1 / scale, form)

    def save(self, ctx: Any, *others: Tuple[Optional[Tensor], Optional[Tensor]]) -> None:
        """Keep the sums for the backward pass.

        Args:
            ctx: context of the autograd function.
            others: further gradients to keep behind the three, each with its input.
        """
        ctx.dtypes = (*self.dtypes, *(None if of is None else of.dtype for _, of in others))
        ctx.save_for_backward(*self._saved(*(gradient for gradient, _ in others)))


def scaled_gradients(ctx: Any, factor: Tensor) -> Tuple[Optional[Tensor], ...]:
    """Return the saved gradients times the factor from above, in the dtypes of their inputs."""
    return _scaled_in_types(ctx.saved_tensors, ctx.dtypes, factor)


def _scaled_in_types(
    saved: Sequence[Optional[Tensor]],
    dtypes: Sequence[Any],
    factor: Optional[Tensor] = None,
) -> Tuple[Optional[Tensor], ...]:
    kept = len(_SingleBlock._fields)
    gradients, block = saved[:-kept], _SingleBlock(*saved[-kept:])
    scaled = [
        None if gradient is None else _scaled(gradient, factor, dtype)
        for gradient, dtype in zip(gradients, dtypes)
    ]
    if block.scores is not None:
        scaled[1] = block.gradient(factor, dtypes[1])
    return tuple(scaled)


def _weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the product of rows and their weights, which is rounded once."""
    return (rows.to(weights.dtype) * weights).to(rows.dtype)


def _scaled(
    gradient: Tensor, factor: Optional[Tensor], dtype: Optional[torch.dtype] = None
) -> Tensor:
    """Return the product of a sum and the factor, if there is one, in ``dtype`` or its own.

    On a CPU it is computed by rows, which stay in the cache on the way.
    """
    wide, dtype = at_least_float32(gradient.dtype), dtype or gradient.dtype

    def scaled(part: Tensor) -> Tensor:
        part = part.to(wide)
        return part if factor is None else part * factor

    by_rows = gradient.device.type == "cpu" and {gradient.dtype, dtype} != {wide}
    if not by_rows or (factor is not None and factor.dim()) or not gradient.numel():
        return scaled(gradient).to(dtype)
    found = torch.empty_like(gradient, dtype=dtype)
    few = cached_rows(gradient[0].numel())
    for place, part in zip(found.split(few), gradient.split(few)):
        place.copy_(scaled(part))
    return found
