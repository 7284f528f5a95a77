"""A checkpoint needs no file of word vectors: it has its own vectors.

With ``--encoder-embed-path`` fairseq reads the file again whenever it builds the model of a
checkpoint, only to overwrite its vectors with those of the checkpoint. So a checkpoint cannot be
loaded where the file is missing.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from typing import Any, Callable, Dict

from spectral_fairseq.compat.patching import Patch, replaces

# Settings that name files of initial word vectors, which training replaces by its own.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")


def forget_files(load_checkpoint_to_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_checkpoint_to_cpu`` so that a model is built without the file of its vectors.

    Args:
        load_checkpoint_to_cpu: fairseq's function.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(load_checkpoint_to_cpu)
    def load_without_files(path: str, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        state: Dict[str, Any] = load_checkpoint_to_cpu(path, *args, **kwargs)
        nodes = [state.get("args"), (state.get("cfg") or {}).get("model")]
        for settings in nodes:
            values = vars(settings) if isinstance(settings, Namespace) else settings
            for name in EMBEDDING_FILES:
                if values is not None and values.get(name) is not None:
                    values[name] = None
        return state

    return load_without_files


PATCH = Patch(
    name="embedding file",
    reason="A checkpoint cannot be loaded where the file of word vectors that it was trained from "
    "is missing.",
    install=replaces({"fairseq.checkpoint_utils:load_checkpoint_to_cpu": forget_files}),
)
