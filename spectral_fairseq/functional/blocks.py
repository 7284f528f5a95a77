"""A batch by blocks of tokens: what the losses that never hold tokens x N scores have in common.

In order: ``at_rows`` leaves out the tokens whose target is padding, ``token_blocks`` cuts
the others, and ``BlockScores`` computes the scores of a block and their softmax; ``GradientSums``
of ``gradient_sums.py`` adds up what follows for contexts, table and bias.

Note [Few shapes]
-----------------
oneDNN prepares every new shape of a product and caches what it prepared, for a thousand shapes
and more. Batches differ in their number of tokens, and so would the last block of each batch:
training would meet new shapes for hundreds of updates, and the cached data would lie scattered
over the heap, between blocks of 16 MiB that then fit no gap. ``benchmarks/bench_block_memory.py``
shows it: without a limit on the number of shapes a process grows by gigabytes. The last block is
therefore filled up with copies of its last row until its size is one of four in an octave: 1, 2,
.. 7, 8, 10, 12, 14, 16, 20, .. The copies take part in the products, a tenth of the last block on
average, and contribute zero to the loss and to every gradient. Rows of zeros would not do: their
scores are the bias alone, and a word whose bias is minus infinity would be the target of some.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_enough, check_range, check_shape
from spectral_fairseq.functional.autograd import differentiable_once
from spectral_fairseq.functional.precision import HALVES, at_least_float32, type_of_products
from spectral_fairseq.functional.products import has_wide_products, matmul_transposed
from spectral_fairseq.functional.token_measures import measured_softmax_, rows_in_cache


class _DistinctRows(torch.autograd.Function):
    """Rows of a tensor, each at most once, so that their gradients are copied and not added."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = values.shape
        return values.index_select(0, rows)

    @staticmethod
    @differentiable_once("without_ignored")
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, rows, grad), None


def kept_rows(ignore_index: Optional[int], targets: Tensor) -> Optional[Tensor]:
    """Indices of the targets, shape (T,), that are not ignored; ``None`` for all of them.

    To find them is the one point at which a loss has to wait for a GPU: their number is the shape
    of all that follows. A boolean mask would search, and wait, once for each tensor and again for
    its gradient.
    """
    if ignore_index is None:
        return None
    return targets.ne(ignore_index).nonzero().squeeze(1)


_ALIKE = "Flatten contexts and targets alike."


def without_ignored(ignore_index: Optional[int], targets: Tensor, *values: Any) -> Tuple[Any, ...]:
    """Return the targets that count, and the rows of ``values`` that belong to them.

    Args:
        ignore_index: target whose tokens are left out; ``None`` leaves out none.
        targets: shape (T,).
        values: as for :func:`at_rows`.

    Raises:
        ConfigurationError: a value has another number of rows than there are targets.
    """
    for rows in values:
        if rows is not None:
            check_shape("`targets`", targets, (len(rows),), _ALIKE)
    return at_rows(kept_rows(ignore_index, targets), targets, *values)


def at_rows(kept: Optional[Tensor], targets: Tensor, *values: Any) -> Tuple[Any, ...]:
    """Return the rows of the targets and of ``values`` that are kept.

    Args:
        kept: from :func:`kept_rows`.
        targets: shape (T,).
        values: tensors of shape (T, *), differentiable once, or ``None``, which stays ``None``.
    """
    if kept is None:
        return (targets, *values)
    rows = [None if each is None else _DistinctRows.apply(each, kept) for each in values]
    return (targets[kept], *rows)


# Number of scores held at a time: 16 MiB of float32. Adding the share of a block to the gradient of
# the table costs a pass over N x d, which smaller blocks would repeat too often.
BLOCK_ELEMENTS = 4 * 1024 * 1024
# On a GPU, whose time is that of starting kernels as long as blocks are small: 512 MiB of float32.
# With 4,096 tokens of a dictionary of 32,768 words a block is still a quarter of what the dense
# loss of 8,192 such tokens holds.
CUDA_BLOCK_ELEMENTS = 128 * 1024 * 1024
# The scores, their log-space form, a temporary of that and what the products read, at most.
BYTES_PER_SCORE = 16
SIZES_PER_OCTAVE = 4


def elements_for(device: torch.device) -> int:
    """Return how many scores are held at a time on ``device``.

    On a GPU it is a power of two, so that it seldom changes and the allocator can use its memory
    again, and takes at most half of the memory that is free.
    """
    if device.type != "cuda":
        return BLOCK_ELEMENTS
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fitting = max(1, free // (2 * BYTES_PER_SCORE))
    return max(BLOCK_ELEMENTS, min(CUDA_BLOCK_ELEMENTS, 1 << (fitting.bit_length() - 1)))


def tokens_per_block(
    matrix: Tensor,
    block_elements: Optional[int] = None,
    softmaxes: int = 1,
    half_precision: bool = False,
    tokens: Optional[int] = None,
) -> int:
    """Return how many tokens fit into a block of ``block_elements`` scores, at least one.

    ``None`` takes :func:`elements_for` the device, and on a CPU at least d / 2 rows. The scores of
    these take half the memory of the table's gradient, and the passes over it, one for each block,
    would otherwise be most of the time: with 267,735 words and d = 410, blocks of 15 tokens take
    2.4 times as long as the dense loss, and blocks of 128 take 0.87 times as long. The same rule
    holds for products of MKL and of oneDNN: no block from 32 to 2,048 rows takes less than 0.85 of
    its time (V = 4,000 to 32,000, d = 64 to 1,024). In half precision d rows take as much; and up
    to 2 d tokens are one block, whose scores take no more than the float32 sum of the table's
    gradient, which is then not needed (``gradient_sums.py``).

    Args:
        matrix: W, shape (N, d).
        block_elements: number of scores held at a time.
        softmaxes: rows of scores of each token.
        half_precision: whether a score takes two bytes, so that twice as many fit.
        tokens: of the batch.
    """
    vocabulary, dim = matrix.shape
    if block_elements is None and matrix.device.type == "cpu":
        rows = max(BLOCK_ELEMENTS // vocabulary, dim // 2)
        if half_precision:
            rows = max(2 * BLOCK_ELEMENTS // vocabulary, dim)
            if tokens is not None and tokens <= 2 * dim:
                rows = max(rows, 2 * dim)
    else:
        rows = (block_elements or elements_for(matrix.device)) // vocabulary
    return max(1, rows // softmaxes)


def rows_for(tokens: int, block: int) -> int:
    """Return the number of rows of a block for ``tokens`` tokens, from ``tokens`` to ``block``."""
    step = max(1, (1 << max(0, tokens.bit_length() - 1)) // SIZES_PER_OCTAVE)
    return min(block, -(-tokens // step) * step)


def token_blocks(tokens: int, block: int) -> Iterator[Tuple[slice, int]]:
    """Yield the tokens of each block, at most ``block``, and the rows to fill it up to.

    :func:`filled` adds the missing rows, and :func:`padded` the zeros that leave them out.
    """
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        yield slice(start, stop), rows_for(stop - start, block)


def filled(values: Tensor, rows: int) -> Tensor:
    """Return ``values``, shape (t, *), and their last row again up to ``rows``; t is 1 or more."""
    missing = rows - values.size(0)
    if missing == 0:
        return values
    return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])


def padded(values: Tensor, rows: int) -> Tensor:
    """Return ``values``, shape (t, *), followed by zeros up to ``rows``; unchanged if t = rows."""
    missing = rows - values.size(0)
    if missing == 0:
        return values
    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])


# 16 bytes of 16-bit numbers.
ALIGNED_COLUMNS = 8


def product_dtype(contexts: Tensor, matrix: Tensor, bounded: bool = True) -> torch.dtype:
    """Return the dtype in which the products of a block are computed.

    It is that of the inputs, or of autocast where autocast is on; but float32 instead of float16
    where the results would be float16 too, whose range does not hold scores of 1e5.

    Args:
        contexts: h.
        matrix: W.
        bounded: whether no gradient of a score is above 1, as ``gradient_sums.py``, Note [Half
            precision], needs it in float16.
    """
    common = torch.promote_types(contexts.dtype, matrix.dtype)
    dtype = type_of_products(contexts, common)
    if dtype == torch.float16 and not (bounded and has_wide_products(dtype, contexts.device)):
        return torch.float32
    return dtype


def check_loss_shapes(
    contexts: Tensor, targets: Optional[Tensor], matrix: Tensor, bias: Optional[Tensor]
) -> None:
    """Refuse tensors whose shapes do not fit together.

    Args:
        contexts: h, shape (T, *, d).
        targets: shape (T,); ``None`` where there are none.
        matrix: W, shape (N, d).
        bias: b, shape (N,).

    Raises:
        ConfigurationError: it names the shapes.
    """
    vocabulary, dim = matrix.shape
    flat, like = _ALIKE, (*contexts.shape[:-1], dim)
    check_shape("`contexts`", contexts, like, "Make the table of the output layer as wide.")
    if targets is not None:
        check_shape("`targets`", targets, contexts.shape[:1], flat)
    if bias is not None:
        check_shape("`bias`", bias, (vocabulary,), "Give one value for each word.")


@lru_cache(maxsize=64)  # each update asks for the same ones
def smoothing_weights(label_smoothing: float, vocabulary: int) -> Tuple[float, float]:
    """Return the weights of the target's -log p and of every word's, 1 - eps - eps_i and eps_i.

    Args:
        label_smoothing: eps.
        vocabulary: N.

    Raises:
        ConfigurationError: eps is outside [0, 1), or there are fewer than two words to smooth over.
    """
    check_label_smoothing(label_smoothing)
    if label_smoothing == 0.0:
        return 1.0, 0.0
    zero = "Set `label_smoothing` to 0."
    check_enough(vocabulary, 2, "words with `label_smoothing`", zero, ConfigurationError)
    uniform = label_smoothing / (vocabulary - 1)
    return 1.0 - label_smoothing - uniform, uniform


def check_label_smoothing(label_smoothing: float) -> None:
    """Refuse an eps outside [0, 1).

    Raises:
        ConfigurationError: it is.
    """
    check_range("`label_smoothing`", label_smoothing, at_least=0, below=1)


def aligned(contexts: Tensor, matrix: Tensor) -> Tuple[Tensor, Tensor]:
    """Contexts and table with zero columns behind them, where a GPU's kernels need these.

    Its kernels for 16-bit numbers read 16 bytes at a time, and a width such as the 410 of a
    Transformer-XL sends the products to slower ones. Zeros change no product, and the gradients of
    the added columns are cut off again.

    Args:
        contexts: h, shape (T, *, d).
        matrix: W, shape (N, d).

    Returns:
        Shapes (T, *, d') and (N, d'), d' a multiple of 8; or the tensors themselves.
    """
    missing = -matrix.size(1) % ALIGNED_COLUMNS
    if missing == 0 or not _wants_alignment(contexts, matrix):
        return contexts, matrix
    return F.pad(contexts, (0, missing)), F.pad(matrix, (0, missing))


def _wants_alignment(contexts: Tensor, matrix: Tensor) -> bool:
    return contexts.is_cuda and product_dtype(contexts, matrix) in HALVES


class BlockScores:
    """Computes the scores s = W h + b of one block of contexts after the other.

    Args:
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        dtype: of the products, from :func:`product_dtype`.

    Attributes:
        table: W in the dtype of the products.
        accumulation_dtype: of the scores.
        overwrites_products: whether :meth:`softmax` stays in the memory of the products, which a
            processor rounds to bfloat16: it is computed in float32, a few rows at a time, which
            stay in the cache.
    """

    def __init__(self, matrix: Tensor, bias: Optional[Tensor], dtype: torch.dtype) -> None:
        self.table = matrix.to(dtype)
        self.accumulation_dtype = at_least_float32(dtype)
        self.bias = None if bias is None else bias.to(self.accumulation_dtype)
        self.overwrites_products = (
            dtype == torch.bfloat16 and matrix.device.type == "cpu" and bias is None
        )

    def rows(self, contexts: Tensor, size: int) -> Tensor:
        """Return ``contexts``, shape (t, *, d), in the dtype of the products and ``size`` rows."""
        return filled(contexts.to(self.table.dtype), size)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the scores of ``rows``, shape (r, d), as a new tensor of shape (r, N)."""
        scores = matmul_transposed(rows, self.table).to(self.accumulation_dtype)
        if self.bias is not None:
            scores += self.bias
        return scores

    def softmax(
        self,
        rows: Tensor,
        targets: Tensor,
        margin: Optional[Tensor] = None,
        measured: Optional[Measured] = None,
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """Return the softmax of the scores, its log sum exp, and the scores of the targets.

        Args:
            rows: shape (r, d).
            targets: shape (r,).
            margin: what the scores of the targets lose, shape (r,).
            measured: to which :func:`softmax_and_targets_` adds.

        Returns:
            Shape (r, N), in the dtype of the products if :attr:`overwrites_products`, and shape
            (r,) twice, in that of the scores.
        """
        if not self.overwrites_products:
            scores = self(rows)
            return (scores, *softmax_and_targets_(scores, targets, margin, measured))
        products = matmul_transposed(rows, self.table)
        few = rows_in_cache(products)
        wide = products.new_empty((few, products.size(1)), dtype=self.accumulation_dtype)
        sums = []
        for start in range(0, len(rows), few):
            part = slice(start, start + few)
            scores = wide[: len(products[part])].copy_(products[part])
            lost = None if margin is None else margin[part]
            sums.append(softmax_and_targets_(scores, targets[part], lost, measured))
            products[part] = scores
        log_z, target_scores = map(torch.cat, zip(*sums))
        return products, log_z, target_scores


def softmax_(scores: Tensor) -> Tensor:
    """Overwrite ``scores``, shape (*, N), by their softmax and return log sum exp, shape (*)."""
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    # exp(top - log Z) is the largest probability, which is never below 1/N.
    return top.sub_(scores.amax(-1).log_())


# Of the rows of a block one part after the other: whether the target is right, and the entropy.
Measured = List[Tuple[Tensor, Tensor]]


def softmax_and_targets_(
    scores: Tensor,
    targets: Tensor,
    margin: Optional[Tensor] = None,
    measured: Optional[Measured] = None,
) -> Tuple[Tensor, Tensor]:
    """Overwrite ``scores``, shape (r, N), as :meth:`BlockScores.softmax` does.

    Args:
        scores: with their bias.
        targets: shape (r,).
        margin: what the scores of the targets lose, shape (r,).
        measured: to which two tensors of shape (r,) are added, or ``None``.

    Returns:
        log sum exp and the scores of the targets, shape (r,) each.
    """
    index = targets.unsqueeze(1)
    if margin is not None:
        scores.scatter_add_(1, index, -margin.unsqueeze(1))
    target_scores = scores.gather(1, index).squeeze(1)
    if measured is None:
        return softmax_(scores), target_scores
    log_z, top, entropy = measured_softmax_(scores)
    measured.append((target_scores >= top, entropy))
    return log_z, target_scores


def detached_without_grad(*inputs: Optional[Tensor]) -> Tuple[Any, ...]:
    """Return ``inputs``, detached where gradients are disabled.

    Under ``torch.no_grad`` autograd still reports ``needs_input_grad`` for tensors that could have
    a gradient, and a loss that computes gradients in the forward pass would compute them in vain.
    """
    if torch.is_grad_enabled():
        return inputs
    return tuple(None if tensor is None else tensor.detach() for tensor in inputs)
