"""Cross entropy over a large vocabulary, block by block of tokens, without tokens x N logits.

With scores s = W h + b, p = softmax(s) and label smoothing eps over N words,

    loss = (1 - eps - eps_i) (-log p_y) + eps_i sum_v (-log p_v),    eps_i = eps / (N - 1),

which is the loss of fairseq's ``label_smoothed_cross_entropy``. Its naive form is
``tests/reference/mixture.py``.

Note [Gradients in the forward pass]
------------------------------------
The loss is a scalar, so the gradient of every block's scores is known, up to the one factor that
arrives from above, as soon as the block's scores are. Each block is multiplied out to the
gradients of contexts, table and bias at once and then forgotten: three matrix products a block,
where recomputation in the backward pass would need four. What is kept between the passes has the
size of the contexts and of the table. It is kept in float32, and rounded to the parameters' dtype
only after the factor from above is applied: under loss scaling that factor is what keeps float16
gradients from vanishing.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.linalg.products import matmul_transposed
from spectral_fairseq.functional.losses.token_blocks import filled, token_blocks, tokens_per_block


def smoothing_weights(label_smoothing: float, vocabulary: int) -> Tuple[float, float]:
    """(weight of the target's -log p, weight of every word's), see the head of this file.

    Raises:
        ConfigurationError: eps outside [0, 1), or fewer than two words to smooth over.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigurationError(
            "--label-smoothing in [0, 1)", repr(label_smoothing), "Choose a value in that range."
        )
    if label_smoothing == 0.0:
        return 1.0, 0.0
    if vocabulary < 2:
        raise ConfigurationError(
            "a vocabulary of two words or more with --label-smoothing",
            f"N = {vocabulary}",
            "Use --label-smoothing 0.",
        )
    uniform = label_smoothing / (vocabulary - 1)
    return 1.0 - label_smoothing - uniform, uniform


def product_dtype(contexts: Tensor, matrix: Tensor) -> torch.dtype:
    """The dtype in which a block's products are taken.

    That of the inputs, or of autocast where it is on; but float32 for float16, in whose range
    neither scores of 1e5 nor probabilities of 1e-8 fit.
    """
    common = torch.promote_types(contexts.dtype, matrix.dtype)
    # A product of two scalars answers for every version of torch and device what autocast does.
    probe = contexts.new_zeros(1, 1, dtype=common)
    dtype = torch.mm(probe, probe).dtype
    return torch.float32 if dtype == torch.float16 else dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of all that is not a product: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softmax_(scores: Tensor) -> Tensor:
    """Overwrite ``scores`` (*, N) by their softmax; the result is log sum exp, shape (*)."""
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    # exp(top - log Z) is the largest probability, never below 1/N.
    return top.sub_(scores.amax(-1).log_())


def check_sizes(contexts: Tensor, targets: Tensor, matrix: Tensor, bias: Optional[Tensor]) -> None:
    """Refuse tensors that do not belong together before a kernel does so less clearly.

    Raises:
        ConfigurationError: naming the shapes.
    """
    vocabulary, dim = matrix.shape
    if contexts.size(-1) != dim:
        raise ConfigurationError(
            f"contexts of d = {dim} dimensions, those of the table",
            f"shape {tuple(contexts.shape)}",
            "Give the head a table of its context dimension.",
        )
    if targets.dim() != 1 or targets.size(0) != contexts.size(0):
        raise ConfigurationError(
            f"one target for each of {contexts.size(0)} contexts",
            f"targets of shape {tuple(targets.shape)}",
            "Flatten contexts and targets alike.",
        )
    if bias is not None and bias.shape != (vocabulary,):
        raise ConfigurationError(
            f"a bias of shape ({vocabulary},)", str(tuple(bias.shape)), "Use one value a word."
        )


class _BlockwiseCrossEntropy(torch.autograd.Function):
    """(loss_sum, nll_sum); gradients of loss_sum only. See Note [Gradients in the forward pass]."""

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        label_smoothing: float,
        block_elements: Optional[int],
    ) -> Tuple[Tensor, Tensor]:
        tokens, vocabulary = contexts.size(0), matrix.size(0)
        target_weight, uniform = smoothing_weights(label_smoothing, vocabulary)
        dtype = product_dtype(contexts, matrix)
        exact = accumulation_dtype(dtype)
        wants_contexts, _, wants_matrix, wants_bias = ctx.needs_input_grad[:4]
        with torch.autocast(contexts.device.type, enabled=False):
            table = matrix.to(dtype)
            offset = None if bias is None else bias.to(exact)
            word_sum = matrix.sum(0, dtype=exact) if uniform else None  # [d]
            bias_sum = 0.0 if offset is None else offset.sum()
            loss_sum, nll_sum = (contexts.new_zeros((), dtype=exact) for _ in range(2))
            grads = GradientSums(contexts, matrix, bias, exact, ctx.needs_input_grad[:4])
            block = tokens_per_block(vocabulary, block_elements)
            for part, size in token_blocks(tokens, block):
                rows = filled(contexts[part].to(dtype), size)  # [b, d]
                words = filled(targets[part], size)  # [b]
                counts = filled(
                    rows.new_ones(targets[part].shape, dtype=exact), size
                )  # [b], 1 or 0
                scores = matmul_transposed(rows, table).to(exact)  # [b, N]
                if offset is not None:
                    scores += offset
                hit = scores.gather(1, words.unsqueeze(1)).squeeze(1)  # [b]
                log_z = softmax_(scores)
                nll = counts @ (log_z - hit)
                nll_sum += nll
                loss_sum += target_weight * nll
                if word_sum is not None:
                    # sum_v -log p_v = N log Z - sum_v s_v, without a pass over the scores.
                    total = rows.to(exact) @ word_sum + bias_sum
                    loss_sum += uniform * (counts @ (vocabulary * log_z - total))
                grads.add_block(
                    part.start,
                    rows,
                    words,
                    scores,
                    table,
                    # d loss / d s = (target_weight + N uniform) p - target_weight [v = y] - uniform
                    (target_weight + vocabulary * uniform) * counts,
                    target_weight * counts,
                )
            if word_sum is not None:
                if wants_contexts:
                    grads.contexts -= uniform * word_sum
                if wants_matrix:
                    grads.matrix -= uniform * contexts.sum(0, dtype=exact)
                if wants_bias:
                    grads.bias -= uniform * tokens
        grads.save(ctx)
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias = scaled_gradients(ctx, grad)
        return contexts, None, matrix, bias, None, None


class GradientSums:
    """Gradients that grow block by block, in the accumulation dtype; absent where not wanted.

    Args:
        contexts: shape (rows, d), one row a softmax.
        matrix: shape (N, d).
        bias: shape (N,), or none.
        dtype: of the sums.
        wanted: which of (contexts, targets, matrix, bias) autograd asks for.
    """

    def __init__(
        self,
        contexts: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        dtype: torch.dtype,
        wanted: Tuple[bool, ...],
    ) -> None:
        def zeros(like: Optional[Tensor], wants: bool) -> Any:
            if like is None or not wants:
                return None
            return torch.zeros(like.shape, dtype=dtype, device=like.device)

        self.contexts = zeros(contexts, wanted[0])
        self.matrix = zeros(matrix, wanted[2])
        self.bias = zeros(bias, wanted[3])
        self.dtypes = (contexts.dtype, matrix.dtype, None if bias is None else bias.dtype)

    def add_block(
        self,
        start: int,
        rows: Tensor,
        words: Optional[Tensor],
        probabilities: Tensor,
        table: Tensor,
        weights: Optional[Tensor] = None,
        hits: Optional[Tensor] = None,
    ) -> None:
        """Add the gradients that follow from d loss / d s = weights * p - hits * [v = words].

        The factors of each row are applied to what has d columns, not to what has N.

        Args:
            start: first row of the block.
            rows: contexts of the block, shape (r, d); those past the last of all count for nothing,
                and their gradients, weights and hits are zero.
            words: target of each row, shape (r,); only with ``hits``.
            probabilities: p, shape (r, N), or any other gradient of the scores without ``weights``.
            table: W, shape (N, d), of the dtype of ``rows``.
            weights: shape (r,).
            hits: shape (r,).
        """
        if self.contexts is None and self.matrix is None and self.bias is None:
            return
        exact = probabilities.dtype
        lean = probabilities.to(rows.dtype)
        if self.contexts is not None:
            gradient = matmul_transposed(lean, table.t()).to(exact)  # [r, d]
            if weights is not None:
                gradient.mul_(weights.unsqueeze(1))
            if words is not None and hits is not None:
                gradient.addcmul_(table[words].to(exact), hits.unsqueeze(1), value=-1)
            into = self.contexts[start : start + rows.size(0)]
            into.copy_(gradient[: into.size(0)])
        if self.matrix is not None:
            weighted = rows
            if weights is not None:
                weighted = (rows.to(exact) * weights.unsqueeze(1)).to(rows.dtype)
            self.matrix += matmul_transposed(lean.t(), weighted.t())  # [N, d]
            if words is not None and hits is not None:
                self.matrix.index_add_(0, words, rows.to(exact) * -hits.unsqueeze(1))
        if self.bias is not None:
            if weights is None:
                self.bias += probabilities.sum(0)
            else:
                self.bias += torch.mv(probabilities.t(), weights)
            if words is not None and hits is not None:
                self.bias.index_add_(0, words, -hits)

    def save(self, ctx: Any, *others: Optional[Tensor]) -> None:
        """Keep the sums for the backward pass, with ``others`` behind them."""
        ctx.dtypes = self.dtypes
        ctx.save_for_backward(self.contexts, self.matrix, self.bias, *others)


def scaled_gradients(ctx: Any, factor: Tensor) -> Tuple[Optional[Tensor], ...]:
    """The saved sums of contexts, matrix and bias times the factor from above, in input dtypes."""
    return tuple(
        None if total is None else (total * factor).to(dtype)
        for total, dtype in zip(ctx.saved_tensors, ctx.dtypes)
    )


def blockwise_cross_entropy(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> Tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy of softmax(W h + b), summed over tokens.

    Equal to ``tests/reference/mixture.py: smoothed_nll(log_softmax(h W' + b))``; the memory it
    needs does not grow with tokens x N.

    Args:
        contexts: h, shape (T, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        label_smoothing: eps in [0, 1).
        ignore_index: target whose tokens count for nothing.
        block_elements: scores held at a time; ``None`` is ``token_blocks.BLOCK_ELEMENTS``.

    Returns:
        loss_sum and nll_sum, scalars in float32 (float64 for float64 input), in nats. Only
        loss_sum has a gradient, and only a first one.

    Raises:
        ConfigurationError: sizes that do not fit, or eps outside its range.
    """
    check_sizes(contexts, targets, matrix, bias)
    if ignore_index is not None:
        kept = targets.ne(ignore_index)
        contexts, targets = contexts[kept], targets[kept]
    return _BlockwiseCrossEntropy.apply(
        contexts, targets, matrix, bias, label_smoothing, block_elements
    )
