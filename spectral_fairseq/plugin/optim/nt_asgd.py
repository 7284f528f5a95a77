"""Optimiser ``nt_asgd``: SGD that averages its iterates from a point that its schedule finds."""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from spectral_fairseq.errors import CheckpointError, ConfigurationError, arguments_as_flags
from spectral_fairseq.lm.averaged_sgd import AveragedSGD


@dataclass
class NTASGDConfig(FairseqDataclass):
    """Flags of the optimiser; the paper trains with --lr 30 --weight-decay 1.2e-6."""

    weight_decay: float = field(
        default=0.0, metadata={"help": "weight decay (L2)", "argparse_alias": "--wd"}
    )
    nt_asgd_from_start: bool = field(
        default=False,
        metadata={
            "help": "average from the first update on, without waiting for the validation loss "
            "to stop improving: fine-tuning, with --finetune-from-model"
        },
    )
    lr: List[float] = II("optimization.lr")


@register_optimizer("nt_asgd", dataclass=NTASGDConfig)
class NTASGD(FairseqOptimizer):
    """Non-monotonically triggered averaged SGD, to be used with ``--lr-scheduler nt_asgd``.

    Merity, Keskar, Socher: "Regularizing and Optimizing LSTM Language Models", ICLR 2018,
    section 3, https://arxiv.org/abs/1708.02182

    Args:
        cfg: the flags.
        params: the parameters to train.
    """

    def __init__(self, cfg: NTASGDConfig, params: Any) -> None:
        super().__init__(cfg)
        with arguments_as_flags(lr="--lr", weight_decay="--weight-decay"):
            self._optimizer = AveragedSGD(params, **self.optimizer_config)
        self._start_where_asked()

    def _start_where_asked(self) -> None:
        if self.cfg.nt_asgd_from_start:
            self._optimizer.start_averaging()

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        """Keyword arguments of the torch optimiser."""
        return {"lr": self.cfg.lr[0], "weight_decay": self.cfg.weight_decay}

    def load_state_dict(
        self, state_dict: Dict[str, Any], optimizer_overrides: Optional[Dict[str, Any]] = None
    ) -> None:
        """Continue from a saved state.

        Args:
            state_dict: of the torch optimiser.
            optimizer_overrides: ``--optimizer-overrides``.
        """
        try:
            super().load_state_dict(state_dict, optimizer_overrides)
        except CheckpointError as error:
            remedy = "Add --reset-optimizer to start this one from the checkpoint's weights."
            raise CheckpointError(error.expected, error.found, remedy) from None
        self._start_where_asked()


def averaged_sgd(optimizer: FairseqOptimizer) -> AveragedSGD:
    """The optimiser under fairseq's wrappers for half precision.

    Args:
        optimizer: the trainer's.

    Returns:
        The torch optimiser.

    Raises:
        ConfigurationError: the optimiser is not ``--optimizer nt_asgd``.
    """
    inner = optimizer.optimizer
    if not isinstance(inner, AveragedSGD):
        raise ConfigurationError(
            "--optimizer nt_asgd with --lr-scheduler nt_asgd",
            f"the optimiser {type(inner).__name__}",
            "Give both flags, or neither.",
        )
    return inner


def show_averages(optimizer: FairseqOptimizer) -> None:
    """Put the averages into the model, which may be a half-precision copy."""
    if averaged_sgd(optimizer).use_averages():
        _update_copy(optimizer)


def show_iterates(optimizer: FairseqOptimizer) -> None:
    """Put the weights that are trained into the model."""
    if averaged_sgd(optimizer).use_iterates():
        _update_copy(optimizer)


def _update_copy(optimizer: FairseqOptimizer) -> None:
    # FP16Optimizer trains a float32 copy of the parameters, which the model does not see.
    if hasattr(optimizer, "_sync_fp32_params_to_fp16"):
        optimizer._sync_fp32_params_to_fp16()
