"""Spectrum control and measures as callbacks: of transformers' Trainer and of Lightning.

:class:`SpectralCallback` is one of either framework, and the other one may be absent. It takes the
trainer, the model and its optimiser from the framework when training begins, as every callback of
them does. Import this module before ``transformers.Trainer``, which fails beside a torchaudio of
another build of torch.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, Dict, List, Optional

from torch import Tensor

from spectral_fairseq.embeddings.weight_norm import tell_epoch
from spectral_fairseq.errors import (
    ConfigurationError,
    SpectralFairseqError,
    UnsupportedError,
    check_count,
    check_range,
    missing_package,
)
from spectral_fairseq.provenance import distribution_version, skip_broken_torchaudio
from spectral_fairseq.training.control import SpectrumControl, share_of_rate
from spectral_fairseq.training.decay_watch import check_decay
from spectral_fairseq.training.hidden_states import KeepsHiddenStates
from spectral_fairseq.training.joining import joined
from spectral_fairseq.training.losses import TokenLoss, check_plain, plain_
from spectral_fairseq.training.output_layer import output_layer, without_wrappers
from spectral_fairseq.training.table_checks import check_trained
from spectral_fairseq.training.tables import whole_weight


class _Missing:
    """Stands for the base class of a framework that is not installed."""


class _MissingToo(_Missing):
    """Stands for that of the other one."""


_Trainer: Any = _Missing
_Exportable: Any = type("_Exportable", (), {})
_Lightning: Any = _MissingToo
_KEEPS_STATES = False  # whether checkpoints of Trainer hold the states of callbacks
skip_broken_torchaudio()
try:
    from transformers.trainer_callback import TrainerCallback

    _Trainer = TrainerCallback
    from transformers.trainer_callback import ExportableState

    # transformers 4.41 keeps them, and does not call on_optimizer_step.
    _Exportable, _KEEPS_STATES = ExportableState, hasattr(TrainerCallback, "on_optimizer_step")
except ImportError:
    pass
try:
    from lightning.pytorch import Callback

    _Lightning = Callback
except ImportError:
    pass


_STEP_YOURSELF = "Call SpectrumControl.step after each step of the optimiser yourself"


def _never_called(hook: str, trainer: Any) -> UnsupportedError:
    return UnsupportedError(
        f"a trainer that calls {hook} of its callbacks",
        f"{type(trainer).__name__}, which has taken a step without it",
        f"{_STEP_YOURSELF}.",
    )


def _is_there(base: Any) -> bool:
    return not issubclass(base, _Missing)


def _hands_on(model: Any) -> bool:
    return any(isinstance(layer, KeepsHiddenStates) for layer in model.modules())


def _measures(model: Any, is_first: bool) -> Dict[str, float]:
    """The measures of the output table, also where a method of this package is on it.

    Args:
        model: or its table.
        is_first: whether this is the worker that logs; the others put a split table together too.
    """
    try:
        table: Any = model if isinstance(model, Tensor) else whole_weight(model)
    except SpectralFairseqError:  # the analysis knows more layouts, and warns where it knows none
        table = model
    if not is_first:
        return {}
    from spectral_fairseq.analysis import training_measures

    return {f"table/{name}": value for name, value in training_measures(table).items()}


def _loss_of(model: Any) -> Optional[TokenLoss]:
    """The loss of this package that a model of transformers computes of its labels."""
    function = None if model is None else getattr(without_wrappers(model), "loss_function", None)
    loss = getattr(function, "loss", None)
    return loss if isinstance(loss, TokenLoss) else None


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


class _Shared:
    """What both frameworks share: the control, and the model that it is of."""

    control: Optional[SpectrumControl]
    measure_every: int
    plain_at_end: bool
    _takes_model: bool

    def _take(self, model: Any) -> None:
        """Bind the control to the model that is trained, or see that it is.

        Raises:
            ConfigurationError: it is of another model.
        """
        if self.control is None:
            return
        if self._takes_model:
            self.control.bind(model)
        check_trained(self.control.weight, model, "SpectrumControl")


class _InTrainer(_Shared):
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
        check_decay(kwargs.get("optimizer"))
        if getattr(args, "restore_callback_states_from_checkpoint", False):
            found = "restore_callback_states_from_checkpoint, which makes them without a control"
            remedy = "Leave it out: this callback restores its own state."
            raise UnsupportedError("callbacks that are made once", found, remedy)
        loss = self._loss(model)
        if loss is not None:
            loss.check_of(model)
        self._take(model)
        self._stand_before_reports()
        if not _KEEPS_STATES:
            _refuse_old_transformers(self.control)
            return
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if self.control is not None and state.global_step:
            self._resume(self.control, saved if isinstance(saved, list) else [saved])

    def _stand_before_reports(self) -> None:
        """Take a place behind Trainer's own flow of control, and before what reports its logs.

        W&B, TensorBoard and the like come first among the callbacks of a Trainer, and would report
        a loss without the measures beside it.
        """
        callbacks = getattr(getattr(self.trainer, "callback_handler", None), "callbacks", [])
        if self not in callbacks:
            return
        first = [type(one).__name__ == "DefaultFlowCallback" for one in callbacks]
        place = first.index(True) + 1 if True in first else 0
        while place < len(callbacks) and isinstance(callbacks[place], _InTrainer):
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
        callbacks = self.trainer.callback_handler.callbacks
        controls = [
            callback
            for callback in callbacks
            if type(callback) is type(self) and callback.control is not None
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
            raise _never_called("on_optimizer_step", self.trainer)
        due = self.measure_every and state.global_step % self.measure_every == 0
        if not due:
            return
        measures = _measures(model, state.is_world_process_zero)
        loss = self._loss(model)
        measures.update({} if loss is None else loss.means(of_all_workers=True))
        if not state.is_world_process_zero:
            return
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

    def _loss(self, model: Any) -> Optional[TokenLoss]:
        """The loss of this package with which the model is trained, if it is one."""
        loss = getattr(self.trainer, "compute_loss_func", None)
        return loss if isinstance(loss, TokenLoss) else _loss_of(model)


def _refuse_old_transformers(control: Optional[SpectrumControl]) -> None:
    if control is not None:
        raise ConfigurationError(
            "a transformers that calls a control and saves its state: 4.42 or newer",
            f"transformers {distribution_version('transformers')}",
            "Install a newer one, or measure without a control.",
        )


def _model_in(pl_module: Any) -> Any:
    """The module itself, or its one part that has an output layer, such as ``self.model``."""
    for model in (pl_module, *pl_module.children()):
        try:
            output_layer(model)
        except ConfigurationError:
            continue
        if model is pl_module or hasattr(model, "get_output_embeddings"):
            return model
    return pl_module


class _InLightning(_Shared):
    """What ``lightning.pytorch.Trainer`` calls."""

    _steps = 0
    _rate: Optional[float] = None
    _loaded: Optional[Dict[str, Any]] = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the model, and refuse what the control cannot follow.

        Several optimisers are refused, and one that lets a factored table decay three times.
        """
        count, remedy = len(trainer.optimizers), f"{_STEP_YOURSELF}, in training_step."
        if count:
            what = "optimiser, for SpectralCallback"
            check_count(count, 1, what, remedy, UnsupportedError)
        check_decay(trainer.optimizers[0] if trainer.optimizers else None)
        if self.plain_at_end:
            check_plain(pl_module)
        self._take(_model_in(pl_module))
        if self.control is not None and self._loaded:
            self.control.load_state_dict(self._loaded)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from the step that is resumed."""
        self._steps = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell weight-norm tables, whose lengths may be frozen for some epochs."""
        tell_epoch(pl_module, trainer.current_epoch + 1)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Take note of the learning rate of the step, which the schedule changes afterwards."""
        if self.control is not None:
            self._rate = share_of_rate(self.control, optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Change and measure the table where that is due, if the optimiser took a step."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        if self.control is not None:
            if self._rate is None:
                raise _never_called("on_before_optimizer_step", trainer)
            self.control.step(self._rate)
        due = self.measure_every and self._steps % self.measure_every == 0
        if due:
            model = _model_in(pl_module)
            table = model if self.control is None else joined(self.control.weight)
            is_first = trainer.is_global_zero and bool(trainer.loggers)
            measures, loss = _measures(table, is_first), _loss_of(model)
            measures.update({} if loss is None else loss.means(of_all_workers=True))
            for logger in trainer.loggers if is_first and measures else ():
                logger.log_metrics(measures, step=self._steps)

    def state_dict(self) -> Dict[str, Any]:
        """What Lightning's checkpoints hold."""
        return {} if self.control is None else self.control.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Go on with the state of the checkpoint that is resumed, once the model is there."""
        self._loaded = state_dict


class SpectralCallback(  # type: ignore[misc]
    _InTrainer, _InLightning, _Trainer, _Exportable, _Lightning
):
    """Control and measures for ``transformers.Trainer`` and for ``lightning.pytorch.Trainer``.

        Trainer(model, arguments, callbacks=[SpectralCallback(control=SpectrumControl(slack=2))])

    The control follows the steps that the optimiser really takes, at the learning rate as a share
    of its schedule's highest one. Checkpoints of the trainer hold its state, and a resumed training
    goes on with it. In Lightning there has to be one optimiser.

    Args:
        control: a :class:`~spectral_fairseq.training.control.SpectrumControl` that was made without
            a model is bound to the one that is trained, whenever a training begins; one of a model
            has to be of that one. ``None`` measures only.
        measure_every: steps between two measures of the output table, which are logged as
            ``table/mean_cosine`` and so on, beside the loss where that is logged; 0 for none.
        plain_at_end: take tables and fused losses off the model when the training ends, with
            :func:`~spectral_fairseq.training.losses.plain_`, so that a plain model is saved.

    Raises:
        ConfigurationError: neither framework is installed, or ``measure_every`` is negative. When
            training begins: a control of another model, or a transformers older than 4.42 and a
            control.
        UnsupportedError: when training begins, several optimisers of Lightning.
    """

    def __init__(
        self,
        control: Optional[SpectrumControl] = None,
        *,
        measure_every: int = 0,
        plain_at_end: bool = False,
    ) -> None:
        if not (_is_there(_Trainer) or _is_there(_Lightning)):
            raise missing_package("transformers", "or lightning, for their callback")
        if measure_every and importlib.util.find_spec("numpy") is None:
            raise missing_package("numpy", "for `measure_every`")
        check_range("`measure_every`", measure_every, at_least=0, whole=True)
        self.trainer: Any = None
        self.control, self._takes_model = control, control is not None and not control.is_bound
        self.measure_every, self.plain_at_end = measure_every, plain_at_end

    def on_train_end(self, trainer: Any, state: Any, control: Any = None, **kwargs: Any) -> None:
        """Make the model plain, if asked to; both frameworks call it, in their own ways."""
        if self.plain_at_end:
            plain_(kwargs.get("model", state))


class SpectralTrainerCallback(SpectralCallback):
    """:class:`SpectralCallback` for a ``transformers.Trainer`` that is made before it.

    Args:
        trainer: to which it is added, with ``add_callback``.
        control: as for :class:`SpectralCallback`.
        **options: likewise.
    """

    def __init__(
        self, trainer: Any, control: Optional[SpectrumControl] = None, **options: Any
    ) -> None:
        if not _is_there(_Trainer):
            raise missing_package("transformers", "for its callback")
        if not _KEEPS_STATES:
            _refuse_old_transformers(control)
        super().__init__(control, **options)
        self.trainer = trainer


class SpectralLightningCallback(SpectralCallback):
    """:class:`SpectralCallback` under the name that it has for Lightning alone.

    Args:
        control: as for :class:`SpectralCallback`.
        **options: likewise.
    """

    def __init__(self, control: Optional[SpectrumControl] = None, **options: Any) -> None:
        if not _is_there(_Lightning):
            raise missing_package("lightning", "for its callback")
        super().__init__(control, **options)
