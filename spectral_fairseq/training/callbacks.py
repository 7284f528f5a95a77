"""Spectrum control and measures as callbacks of transformers' Trainer and of Lightning.

:class:`SpectralCallback` is a callback of both frameworks, of which one may be absent. It takes the
trainer, the model and its optimiser from the framework when training begins, as every callback
does. Import this module before ``transformers.Trainer``, which fails beside a torchaudio of
another build of torch.

In order: ``training/trainer_callback.py: InTrainer`` or
    ``training/lightning_callback.py: InLightning``, which
    ``training/callback_base.py: CallbackBase`` binds to the model.

Note [Whose callback it is]
---------------------------
Importing a framework takes seconds, and a program trains with one. So a callback belongs to the
frameworks that are imported when it is made or, if none is, to those that are installed. If another
framework is imported later, the callback joins it at the first hook that is called. The class that
is made has the name of the one that was asked for, by which both frameworks keep the states of
callbacks.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from spectral_fairseq.errors import check_range, missing_package
from spectral_fairseq.provenance import skip_broken_torchaudio
from spectral_fairseq.training.control import SpectrumControl
from spectral_fairseq.training.lightning_callback import InLightning, lightning_bases
from spectral_fairseq.training.trainer_callback import InTrainer, keeps_states, trainer_bases

skip_broken_torchaudio()

# Package of a framework -> the base classes of its callbacks, which are imported when it is called.
FRAMEWORKS: Dict[str, Callable[[], Tuple[type, ...]]] = {
    "transformers": trainer_bases,
    "lightning": partial(lightning_bases, "lightning.pytorch"),
    "pytorch_lightning": partial(lightning_bases, "pytorch_lightning"),
}
# A class, and the base classes of frameworks -> the class of both.
_classes: Dict[Tuple[type, Tuple[type, ...]], type] = {}


def _of_frameworks(kind: Any) -> Any:
    """A class of callbacks, made one of the frameworks; see Note [Whose callback it is]."""
    written = kind.__dict__.get("written", kind)
    imported = [name for name in kind.frameworks if name in sys.modules]
    bases = _bases(imported) or _bases(kind.frameworks)
    added = tuple(base for base in bases if not issubclass(written, base))
    if added and (written, added) not in _classes:
        names = {name: getattr(written, name) for name in ("__module__", "__qualname__", "__doc__")}
        made = type(written.__name__, (written, *added), {**names, "written": written})
        _classes[written, added] = made
    return _classes[written, added] if added else kind


def _bases(frameworks: Sequence[str]) -> Tuple[type, ...]:
    return tuple(base for name in frameworks for base in FRAMEWORKS[name]())


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)


class SpectralCallback(InTrainer, InLightning):
    """Control and measures for ``transformers.Trainer`` and for ``lightning.pytorch.Trainer``.

        Trainer(model, arguments, callbacks=[SpectralCallback(control=SpectrumControl(slack=2))])

    The control follows the steps that the optimiser really takes, at the learning rate as a share
    of its schedule's highest one. Checkpoints of the trainer hold its state, and a resumed training
    goes on with it. In Lightning there has to be one optimiser, and one callback of this class.

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

    frameworks: Tuple[str, ...] = ("transformers", "lightning", "pytorch_lightning")

    def __new__(cls, *_: Any, **__: Any) -> SpectralCallback:
        """One that is a callback of the frameworks; see Note [Whose callback it is]."""
        made: SpectralCallback = super().__new__(_of_frameworks(cls))
        return made

    def __init__(
        self,
        control: Optional[SpectrumControl] = None,
        *,
        measure_every: int = 0,
        plain_at_end: bool = False,
    ) -> None:
        if not _bases([name for name in self.frameworks if name in sys.modules]):
            first, *others = self.frameworks
            use = f"or {others[0]}, for their callback" if others else "for its callback"
            raise missing_package(first, use)
        if measure_every and importlib.util.find_spec("numpy") is None:
            raise missing_package("numpy", "for `measure_every`")
        check_range("`measure_every`", measure_every, at_least=0, whole=True)
        self.trainer: Any = None
        self.control, self._takes_model = control, control is not None and not control.is_bound
        self.measure_every, self.plain_at_end = measure_every, plain_at_end

    def __getattr__(self, name: str) -> Any:
        """A hook of a framework that has been imported since this was made."""
        kind = _of_frameworks(type(self))
        if name.startswith("__") or kind is type(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__class__ = kind
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time, so pickle and deepcopy are told how."""
        return _empty, (type(self).__dict__.get("written", type(self)),), self.__dict__


class SpectralTrainerCallback(SpectralCallback):
    """:class:`SpectralCallback` for a ``transformers.Trainer`` that is made before it.

    Args:
        trainer: to which it is added, with ``add_callback``.
        control: as for :class:`SpectralCallback`.
        **options: likewise.
    """

    frameworks = ("transformers",)

    def __init__(
        self, trainer: Any, control: Optional[SpectrumControl] = None, **options: Any
    ) -> None:
        super().__init__(control, **options)
        keeps_states(control)  # which may refuse
        self.trainer = trainer


class SpectralLightningCallback(SpectralCallback):
    """:class:`SpectralCallback` under the name that it has for Lightning alone."""

    frameworks = ("lightning", "pytorch_lightning")
