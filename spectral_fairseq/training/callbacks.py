"""Spectrum control and measures as callbacks: of transformers' Trainer and of Lightning.

Each class needs its own framework alone; the other one may be absent. Import this module before
``transformers.Trainer``, which fails beside a torchaudio of another build of torch.
"""

from __future__ import annotations

import importlib.util
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
from spectral_fairseq.training.control import SpectrumControl
from spectral_fairseq.training.hidden_states import KeepsHiddenStates
from spectral_fairseq.training.losses import TokenLoss, check_plain, plain_
from spectral_fairseq.training.modules import output_layer, without_wrappers
from spectral_fairseq.training.tables import check_decay


class _Missing:
    """Stands for the base class of a framework that is not installed."""


_Trainer: Any = _Missing
_Exportable: Any = type("_Exportable", (), {})
_Lightning: Any = _Missing
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


def _check(base: Any, package: str, measure_every: int) -> None:
    if base is _Missing:
        raise missing_package(package, "for its callback")
    if measure_every and importlib.util.find_spec("numpy") is None:
        raise missing_package("numpy", "for `measure_every`")
    check_range("`measure_every`", measure_every, at_least=0, whole=True)


def _hands_on(model: Any) -> bool:
    return any(isinstance(layer, KeepsHiddenStates) for layer in model.modules())


def _measures(model: Any) -> Dict[str, float]:
    """The measures of the output table, also where a method of this package is on it."""
    from spectral_fairseq.analysis import training_measures

    try:
        table: Any = model if isinstance(model, Tensor) else output_layer(model).weight
        measures = training_measures(table.detach())
    except SpectralFairseqError:  # the analysis knows more layouts, and warns where it knows none
        measures = training_measures(model)
    return {f"table/{name}": value for name, value in measures.items()}


def _share(control: SpectrumControl, optimizer: Any) -> float:
    """The present learning rate of the controlled table, as a share of the highest of its schedule.

    The schedulers of torch keep the rate that they multiply as ``initial_lr``, and those that rise
    above it (one cycle) their peak as ``max_lr``. Where neither is kept, as by ReduceLROnPlateau,
    the first rate counts as the highest, and is kept with the optimiser's state from then on.
    """
    weight = control.weight
    groups = optimizer.param_groups
    table_groups = [
        group for group in groups if any(parameter is weight for parameter in group["params"])
    ]
    group = (table_groups or groups)[0]
    if group["lr"] is None:  # Adafactor chooses its rate itself
        return 1.0
    group.setdefault("initial_lr", float(group["lr"]))
    highest = max(float(group.get(name) or 0.0) for name in ("initial_lr", "max_lr"))
    return min(1.0, float(group["lr"]) / highest) if highest > 0 else 1.0


class SpectralTrainerCallback(_Trainer, _Exportable):  # type: ignore[misc]
    """Control and measures for ``transformers.Trainer``.

    The control follows the steps that the optimiser really takes, at the learning rate as a share
    of its schedule's highest one. Trainer's checkpoints hold its state, and a resumed training goes
    on with it. Add it to the trainer with ``add_callback``.

    Args:
        trainer: whose model is trained, and through which measures are logged.
        control: of its model; ``None`` measures only.
        measure_every: steps between two measures of the output table, which are logged as
            ``table/mean_cosine`` and so on; 0 for none.
        plain_at_end: take tables and fused losses off the model when the training ends, with
            :func:`~spectral_fairseq.training.losses.plain_`, so that ``trainer.save_model()`` saves
            a plain model.

    Raises:
        ConfigurationError: transformers is not installed, or older than 4.42 and a control is
            given, or ``measure_every`` is negative.
    """

    def __init__(
        self,
        trainer: Any,
        control: Optional[SpectrumControl] = None,
        *,
        measure_every: int = 0,
        plain_at_end: bool = False,
    ) -> None:
        _check(_Trainer, "transformers", measure_every)
        if control is not None and not _KEEPS_STATES:
            raise ConfigurationError(
                "a transformers that calls a control and saves its state: 4.42 or newer",
                f"transformers {distribution_version('transformers')}",
                "Install a newer one, or measure without a control.",
            )
        self.trainer, self.control = trainer, control
        self.measure_every, self.plain_at_end = measure_every, plain_at_end
        self._is_called = False

    def state(self) -> Dict[str, Any]:
        """What Trainer writes into ``trainer_state.json``."""
        attributes = {} if self.control is None else {"spectrum_control": self.control.state_dict()}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Check how the model is trained, and go on with the state of a checkpoint."""
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
            found = "restore_callback_states_from_checkpoint, which makes them without a trainer"
            remedy = "Leave it out: this callback restores its own state."
            raise UnsupportedError("callbacks that are made once", found, remedy)
        if not _KEEPS_STATES:
            return
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if self.control is not None and state.global_step:
            self._resume(self.control, saved if isinstance(saved, list) else [saved])

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
            self.control.step(_share(self.control, optimizer))

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Measure the table if that is due."""
        if self.control is not None and not self._is_called:
            raise _never_called("on_optimizer_step", self.trainer)
        due = self.measure_every and state.global_step % self.measure_every == 0
        if due and state.is_world_process_zero:
            measures = {**_measures(model), **self._of_loss(model)}
            if measures:
                self.trainer.log(measures)

    def _of_loss(self, model: Any) -> Dict[str, float]:
        """The mean of (log Z)^2, where the loss has it."""
        loss = getattr(self.trainer, "compute_loss_func", None)
        if not isinstance(loss, TokenLoss):
            loss = getattr(getattr(without_wrappers(model), "loss_function", None), "loss", None)
        mean_square = getattr(loss, "mean_square", None)
        return {} if mean_square is None else {"z_loss": float(mean_square)}

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Make the model plain, if asked to."""
        if self.plain_at_end:
            plain_(model)


class SpectralLightningCallback(_Lightning):  # type: ignore[misc]
    """Control and measures for ``lightning.pytorch.Trainer`` with one optimiser.

    Lightning's checkpoints hold the state of the control.

    Args:
        control: of the model inside the ``LightningModule``.
        measure_every: steps between two measures of the controlled table, or else of the output
            table that is found in the module, which are logged as ``table/mean_cosine`` and so on;
            0 for none.

    Raises:
        ConfigurationError: Lightning is not installed, or ``measure_every`` is negative.
        UnsupportedError: several optimisers.
    """

    def __init__(
        self, control: Optional[SpectrumControl] = None, *, measure_every: int = 0
    ) -> None:
        _check(_Lightning, "lightning", measure_every)
        self.control, self.measure_every = control, measure_every
        self._steps = 0
        self._rate: Optional[float] = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse several optimisers, and one that lets a factored table decay three times."""
        count, remedy = len(trainer.optimizers), f"{_STEP_YOURSELF}, in training_step."
        if count:
            what = "optimiser, for SpectralLightningCallback"
            check_count(count, 1, what, remedy, UnsupportedError)

        check_decay(trainer.optimizers[0] if trainer.optimizers else None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from the step that is resumed."""
        self._steps = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell weight-norm tables, whose lengths may be frozen for some epochs."""
        tell_epoch(pl_module, trainer.current_epoch + 1)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Take note of the learning rate of the step, which the schedule changes afterwards."""
        if self.control is not None:
            self._rate = _share(self.control, optimizer)

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
        if due and trainer.is_global_zero and trainer.logger is not None:
            measures = _measures(pl_module if self.control is None else self.control.weight)
            if measures:
                trainer.logger.log_metrics(measures, step=self._steps)

    def state_dict(self) -> Dict[str, Any]:
        """What Lightning's checkpoints hold."""
        return {} if self.control is None else self.control.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Go on with the state of the checkpoint that is resumed."""
        if self.control is not None and state_dict:
            self.control.load_state_dict(state_dict)
