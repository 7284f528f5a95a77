"""Base class of embedding tables whose matrix is computed from other parameters."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, Callable, Dict, Sequence

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.base import Table
from spectral_fairseq.errors import CheckpointError, ConfigurationError


def hook(parameter: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """Let ``change`` transform every gradient of ``parameter``, even if it is frozen now."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(change)
    parameter.requires_grad_(trained)


class FactoredEmbedding(Table):
    """Base class of tables that store factors of W instead of W.

    Args:
        num_embeddings: N, all rows of the dictionary.
        embedding_dim: d.
        padding_idx: row that starts at zero and never receives a gradient, neither from the
            look-up nor from the softmax; a negative number counts from the end.
        excluded_rows: further rows that penalties and measures leave out (``madeupword0000``).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int,
        excluded_rows: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self._exclude(padding_idx, excluded_rows)

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
        if tuple(weight.shape) != shape:
            raise ConfigurationError(
                f"a checkpoint table of shape {shape} for {name}",
                f"one of shape {tuple(weight.shape)}",
                "Use the dictionary and the embedding dimension of that checkpoint.",
            )
        if not torch.isfinite(weight).all():
            raise CheckpointError(
                f"finite numbers in {name}.weight of the checkpoint",
                f"infinity or NaN in {int((~torch.isfinite(weight)).any(1).sum())} rows",
                "Training diverged, or the file is damaged: use an earlier checkpoint.",
            )
        # Factors of 16 bits would multiply to another matrix.
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        for key, value in self.factor(wide).items():
            state_dict[f"{name}.{key}"] = value

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Re-register the gradient hooks after deepcopy or unpickling."""
        super().__setstate__(state)
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Register with :func:`hook` what changes the gradients of the parameters."""
        raise NotImplementedError

    def _without_padding(self, grad: Tensor) -> Tensor:
        # A tied softmax gives the padding row a gradient, which the look-up does not. It is left
        # out of a copy, since autograd may hand the same gradient on to other tensors.
        grad = grad.clone()
        grad[self.padding_idx].zero_()
        return grad
