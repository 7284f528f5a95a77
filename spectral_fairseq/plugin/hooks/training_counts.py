"""Tables that start from word counts learn for which task they are built.

fairseq passes the task to ``build_model`` of an architecture, but not on to ``build_embedding``.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.plugin.tasks.training_counts import building_for


def _telling_task(build_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build_model)
    def tell_and_build(cfg: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
        from_checkpoint = bool(args[0] if args else kwargs.get("from_checkpoint", False))
        with building_for(task, from_checkpoint):
            return build_model(cfg, task, *args, **kwargs)

    return tell_and_build


PATCH = Patch(
    name="training counts",
    reason="Weight-norm tables count </s> and <unk> in the training data of the task, which "
    "fairseq does not pass to what builds them.",
    install=replaces({"fairseq.models:build_model": _telling_task}),
)
