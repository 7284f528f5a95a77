"""mBART is fine-tuned: its task reads its settings by the name that its base class once had."""

from __future__ import annotations

from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces, wrapping


@wrapping
def with_args(
    self: Any, args: Any, *more: Any, original: Callable[..., None], **kwargs: Any
) -> None:
    """Wrap the ``__init__`` of a task so that its settings have their older name, ``args``, too."""
    self.args = args
    original(self, args, *more, **kwargs)


_BART = "fairseq.tasks.translation_from_pretrained_bart:TranslationFromPretrainedBARTTask"
MBART_TASK = Patch(
    name="task of mBART",
    reason="--task translation_from_pretrained_bart fails with \"no attribute 'args'\".",
    install=replaces({f"{_BART}.__init__": with_args}),
)
