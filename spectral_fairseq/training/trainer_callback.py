"""What ``transformers.Trainer`` calls of a callback.

In order: ``InTrainer.on_train_begin`` binds the control and gives it the state of a checkpoint,
    ``InTrainer.on_optimizer_step`` changes the table, ``InTrainer.on_step_end`` measures it,
    ``InTrainer.on_log`` puts the measures beside the loss, and ``InTrainer.on_train_end`` makes
    the model plain.
"""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Optional, Tuple

from spectral_fairseq.embeddings.weight_norm import tell_epoch
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.provenance import distribution_version
from spectral_fairseq.training.callback_base import (
    CallbackBase,
    called_once,
    loss_of,
    measures_of,
    never_called,
)
from spectral_fairseq.training.control import SpectrumControl, share_of_rate
from spectral_fairseq.training.hidden_states import KeepsHiddenStates
from spectral_fairseq.training.losses import check_plain, plain_
from spectral_fairseq.training.optimizer_watch import check_optimizer
from spectral_fairseq.training.token_loss import TokenLoss


def trainer_bases() -> Tuple[type, ...]:
    """The classes of a callback of Trainer; none where transformers is not installed."""
    try:
        from transformers.trainer_callback import TrainerCallback
    except ImportError:
        return ()
    try:
        from transformers.trainer_callback import ExportableState
    except ImportError:
        return (TrainerCallback,)
    return TrainerCallback, ExportableState


def keeps_states(control: Optional[SpectrumControl]) -> bool:
    """Whether checkpoints of Trainer hold the states of callbacks, as those with a control need.

    Raises:
        ConfigurationError: they do not, and there is a control.
    """
    bases = trainer_bases()
    # transformers 4.41 keeps them, and does not call on_optimizer_step.
    keeps = len(bases) > 1 and hasattr(bases[0], "on_optimizer_step")
    if control is not None and not keeps:
        raise ConfigurationError(
            "a transformers that calls a control and saves its state: 4.42 or newer",
            f"transformers {distribution_version('transformers')}",
            "Install a newer one, or measure without a control.",
        )
    return keeps


def _hands_on(model: Any) -> bool:
    return any(isinstance(layer, KeepsHiddenStates) for layer in model.modules())


def _trainer_of(callback: Any) -> Any:
    """The trainer that calls this callback; Trainer hands its callbacks everything but itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "callback_handler", None)
        if any(one is callback for one in getattr(handler, "callbacks", ())):
            return caller
        frame = frame.f_back
    return None


class InTrainer(CallbackBase):
    """What ``transformers.Trainer`` calls."""

    trainer: Any
    _is_called = False
    _beside_loss: Optional[Dict[str, float]] = None

    def state(self) -> Dict[str, Any]:
        """What Trainer writes into ``trainer_state.json``."""
        attributes = {} if self.control is None else {"spectrum_control": self.control.state_dict()}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Check how the model is trained, and go on with the state of a checkpoint."""
        self.trainer = _trainer_of(self) or self.trainer
        if self.plain_at_end:
            check_plain(model)  # before the training, not after it
        self._check_smoothing(float(getattr(args, "label_smoothing_factor", 0.0)), model)
        if getattr(args, "use_liger_kernel", False) and _hands_on(model):
            raise UnsupportedError(
                "one fused loss in a training",
                "use_liger_kernel, which computes a cross entropy itself, beside another loss",
                "Leave use_liger_kernel out, or fused_loss_ and mixture_.",
            )
        check_optimizer(kwargs.get("optimizer"))
        if getattr(args, "restore_callback_states_from_checkpoint", False):
            found = "restore_callback_states_from_checkpoint, which makes them without a control"
            remedy = "Leave it out: this callback restores its own state."
            raise UnsupportedError("callbacks that are made once", found, remedy)
        loss = self._loss(model)
        if loss is not None:
            loss.check_of(model)
        self.take(model, self._callbacks())
        optimizer = kwargs.get("optimizer")
        if self.control is not None and optimizer is not None and self.control.follows(optimizer):
            raise called_once(
                "one that follows the optimiser by itself, in SpectralCallback",
                "Leave control.follow(optimizer) out, or the control in SpectralCallback.",
            )
        self._stand_before_reports()
        if not keeps_states(self.control):
            return
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if self.control is not None and state.global_step:
            self._resume(self.control, saved if isinstance(saved, list) else [saved])

    def _callbacks(self) -> List[Any]:
        """All callbacks of the trainer."""
        return getattr(getattr(self.trainer, "callback_handler", None), "callbacks", [])

    def _stand_before_reports(self) -> None:
        """Take a place behind Trainer's own flow of control, and before what reports its logs.

        W&B, TensorBoard and the like come first among the callbacks of a Trainer, and would report
        a loss without the measures beside it.
        """
        callbacks = self._callbacks()
        if self not in callbacks:
            return
        first = [type(one).__name__ == "DefaultFlowCallback" for one in callbacks]
        place = first.index(True) + 1 if True in first else 0
        while place < len(callbacks) and isinstance(callbacks[place], InTrainer):
            if callbacks[place] is self:
                return
            place += 1
        # In the middle of a walk along this list: those before it have been called, and stay so.
        callbacks.remove(self)
        callbacks.insert(place, self)

    def _check_smoothing(self, factor: float, model: Any) -> None:
        """Refuse label smoothing that Trainer would leave to a loss that does not know of it."""
        if not factor or not _hands_on(model):
            return
        loss = getattr(self.trainer, "compute_loss_func", None)
        eps = loss.label_smoothing if isinstance(loss, TokenLoss) else None
        if eps != factor:
            raise ConfigurationError(
                "label smoothing that the loss of spectral_fairseq.training computes",
                f"label_smoothing_factor={factor:g} in TrainingArguments, and "
                + ("no such loss in compute_loss_func" if eps is None else f"{eps:g} in the loss"),
                "Pass label_smoothing to fused_loss_ or mixture_, and no label_smoothing_factor.",
            )

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Tell weight-norm tables, whose lengths may be frozen for some epochs."""
        tell_epoch(model, int(state.epoch or 0) + 1)

    def _resume(self, control: SpectrumControl, saved: List[Dict[str, Any]]) -> None:
        """Give a control its state among those of all callbacks of this class.

        Trainer appends them to a list at each save, where there are several.
        """
        states = [entry["attributes"].get("spectrum_control") for entry in saved]
        controls = [
            callback
            for callback in self._callbacks()
            if type(callback).__name__ == type(self).__name__ and callback.control is not None
        ]
        latest = [state for state in states if state is not None][-len(controls) :]
        together = len({state["updates"] for state in latest}) == 1  # or they are of two saves
        if latest and not (together and len(latest) == len(controls)):
            wanted = f"a checkpoint of a training with {len(controls)} callbacks of a control"
            remedy = "Resume with the callbacks of that training."
            raise ConfigurationError(wanted, "one with fewer", remedy)
        if latest:
            control.load_state_dict(latest[controls.index(self)])

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Change the table if that is due after this step."""
        self._is_called = True
        if self.control is not None and not getattr(optimizer, "step_was_skipped", False):
            self.control.step(share_of_rate(self.control, optimizer))

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Measure the table if that is due."""
        if self.control is not None and not self._is_called:
            raise never_called("on_optimizer_step", self.trainer)
        if not self.is_measured(state.global_step):
            return
        measures = measures_of(model, self._loss(model), state.is_world_process_zero)
        if control.should_log:  # Trainer logs the loss of this step next
            self._beside_loss = measures
        elif measures:
            self._log_alone(measures)

    def _log_alone(self, measures: Dict[str, float]) -> None:
        """Log measures of a step whose loss is not logged.

        TRL's trainers would add the means of their own metrics since the last log to these.
        """
        kind: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", ())
        log = kind.log if isinstance(self.trainer, kind) else type(self.trainer).log
        log(self.trainer, measures)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Put measures beside the loss of their step, in the history and for all that report it."""
        if self._beside_loss and logs is not None and "loss" in logs:
            logs.update(self._beside_loss)
            state.log_history[-1].update(self._beside_loss)
            self._beside_loss = None

    def on_train_end(self, args: Any, state: Any, control: Any = None, **kwargs: Any) -> None:
        """Make the model plain, if asked to; Lightning, which gives two arguments, has no model."""
        if self.plain_at_end and "model" in kwargs:
            plain_(kwargs["model"])

    def _loss(self, model: Any) -> Optional[TokenLoss]:
        """The loss of this package with which the model is trained, if it is one."""
        loss = getattr(self.trainer, "compute_loss_func", None)
        return loss if isinstance(loss, TokenLoss) else loss_of(model)
