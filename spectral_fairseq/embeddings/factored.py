"""What every table that is stored as something else than its own matrix does alike."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, Callable, Dict

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import CheckpointError, ConfigurationError


def hook(parameter: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """Let ``change`` pass every gradient of ``parameter``, which may be frozen for now."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(change)
    parameter.requires_grad_(trained)


class FactoredEmbedding(nn.Module):
    """Base of the parameterised tables; see the subclasses for what they store."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int

    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict of this table that equals a dense one, shape (N, d); deterministic."""
        raise NotImplementedError

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """fairseq's hook: turn a plain checkpoint's table into factors, in place.

        Called once for each name under which a shared table appears; the factorisation is
        deterministic, so all of them receive the same factors.

        Raises:
            ConfigurationError: a table of another shape.
            CheckpointError: a table with infinity or NaN in it, which has no factors.
        """
        weight = state_dict.pop(f"{name}.weight", None)
        if weight is None or any(f"{name}.{entry}" in state_dict for entry in self._parameters):
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
                "Training diverged, or the file is damaged: take an earlier checkpoint.",
            )
        for key, value in self.factor(weight).items():
            state_dict[f"{name}.{key}"] = value

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Of ``copy.deepcopy`` and ``pickle``, whose new parameters come without their hooks."""
        super().__setstate__(state)
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Put on the parameters, by :func:`hook`, what keeps their gradients in order."""
        raise NotImplementedError

    def _without_padding(self, grad: Tensor) -> Tensor:
        # The tied softmax gives the padding row a gradient that the look-up does not. In place,
        # which saves a copy of the table: the products make this gradient for one factor alone.
        grad[self.padding_idx].zero_()
        return grad
