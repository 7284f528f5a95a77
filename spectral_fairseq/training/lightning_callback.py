"""What the Trainer of Lightning calls of a callback.

In order: ``InLightning.on_fit_start`` binds the control, gives it the state of a checkpoint and
    lets it follow the optimiser, and ``InLightning.on_train_batch_end`` measures the table. Where
    an optimiser does not tell of its steps, ``InLightning.on_before_optimizer_step`` keeps the rate
    and ``InLightning.on_train_batch_end`` changes the table. ``InLightning.on_fit_end`` makes the
    model plain.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Dict, Optional, Tuple

from spectral_fairseq.embeddings.weight_norm import tell_epoch
from spectral_fairseq.errors import ConfigurationError, UnsupportedError, check_count
from spectral_fairseq.training.callback_base import (
    STEP_YOURSELF,
    CallbackBase,
    loss_of,
    measures_of,
    never_called,
)
from spectral_fairseq.training.control import share_of_rate
from spectral_fairseq.training.joining import joined
from spectral_fairseq.training.losses import check_plain, plain_
from spectral_fairseq.training.optimizer_watch import check_optimizer
from spectral_fairseq.training.output_layer import output_layer


def lightning_bases(module: str) -> Tuple[type, ...]:
    """The class of a callback of Lightning; none where it is not installed.

    Args:
        module: ``lightning.pytorch`` or ``pytorch_lightning``: it has two names, and two copies.
    """
    try:
        return (importlib.import_module(module).Callback,)
    except ImportError:
        return ()


def _model_in(pl_module: Any) -> Any:
    """The module or its part, such as ``self.model``, that tells its output layer; or the module.

    A ``head`` of the module may be something else than the output layer of the model in it.
    """
    for model in (pl_module, *pl_module.children()):
        with contextlib.suppress(ConfigurationError):
            if hasattr(model, "get_output_embeddings") and output_layer(model) is not None:
                return model
    return pl_module


class InLightning(CallbackBase):
    """What ``lightning.pytorch.Trainer`` calls."""

    _steps = 0
    _rate: Optional[float] = None
    _follows = False
    _loaded: Optional[Dict[str, Any]] = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the model, and refuse what the control cannot follow.

        Several optimisers are refused, and one that lets a factored table decay three times.
        """
        count, what = len(trainer.optimizers), "optimiser, for SpectralCallback"
        if count:
            check_count(count, 1, what, f"{STEP_YOURSELF}, in training_step.", UnsupportedError)
        optimizer = trainer.optimizers[0] if count else None
        check_optimizer(optimizer)
        if self.plain_at_end:
            check_plain(pl_module)
        self.take(_model_in(pl_module), trainer.callbacks)
        if self.control is None:
            return
        if self._loaded:
            self.control.load_state_dict(self._loaded)
        self._loaded = None  # of this training, not of the next one
        # Lightning counts steps that a scaler skips too, and all steps of a batch as one.
        self._follows = hasattr(optimizer, "register_step_post_hook")  # from torch 2.0 on
        if self._follows:
            self.control.follow(optimizer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from the step that is resumed."""
        self._steps = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell weight-norm tables, whose lengths may be frozen for some epochs."""
        tell_epoch(pl_module, trainer.current_epoch + 1)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Take note of the learning rate of the step, which the schedule changes afterwards."""
        if self.control is not None and not self._follows:
            self._rate = share_of_rate(self.control, optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Change and measure the table where that is due, if the optimiser took a step."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        if self.control is not None and not self._follows:
            if self._rate is None:
                raise never_called("on_before_optimizer_step", trainer)
            self.control.step(self._rate)
        if self.is_measured(self._steps):
            model = _model_in(pl_module)
            table = model if self.control is None else joined(self.control.weight)
            is_first = trainer.is_global_zero and bool(trainer.loggers)
            measures = measures_of(table, loss_of(model), is_first)
            for logger in trainer.loggers if measures else ():
                logger.log_metrics(measures, step=self._steps)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the model plain, if asked to, when it has its last checkpoint and averages.

        ModelCheckpoint and EMAWeightAveraging take it as it was trained, in ``on_train_end``.
        """
        if self.plain_at_end:
            plain_(pl_module)

    def state_dict(self) -> Dict[str, Any]:
        """What Lightning's checkpoints hold."""
        return {} if self.control is None else self.control.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Go on with the state of the checkpoint that is resumed, once the model is there."""
        self._loaded = state_dict
