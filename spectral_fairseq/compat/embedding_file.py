"""A checkpoint needs no file of word vectors: it has its own vectors.

With ``--encoder-embed-path`` fairseq reads the file again whenever it builds the model of a
checkpoint, only to overwrite its vectors with those of the checkpoint. So a checkpoint cannot be
loaded where the file is missing.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

from spectral_fairseq.checkpoints.settings import by_name
from spectral_fairseq.compat.patching import Patch, replaces, wrapping

# Settings that name files of initial word vectors, which training replaces by its own.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")


@wrapping
def forget_files(
    path: str, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Dict[str, Any]:
    """Wrap ``load_checkpoint_to_cpu`` so that a model is built without the file of its vectors."""
    state: Dict[str, Any] = original(path, *args, **kwargs)
    nodes = [state.get("args"), (state.get("cfg") or {}).get("model")]
    for settings in nodes:
        values = by_name(settings)
        for name in EMBEDDING_FILES:
            if values is not None and name in values and values[name] is not None:
                values[name] = None
    return state


EMBEDDING_FILE = Patch(
    name="embedding file",
    reason="A checkpoint cannot be loaded where the file of word vectors that it was trained from "
    "is missing.",
    install=replaces({"fairseq.checkpoint_utils:load_checkpoint_to_cpu": forget_files}),
)
