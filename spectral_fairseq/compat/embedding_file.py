"""Files of word vectors: clear errors in training, and no need of the file afterwards.

fairseq answers an empty file with ``StopIteration``, and vectors of another width with torch's
complaint about a copy. And it reads the file again whenever it builds the model of a checkpoint,
only to overwrite the vectors with the checkpoint's own, so that a checkpoint cannot be loaded where
the file is missing.
"""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from typing import Any, Callable, Dict

import torch

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.files import why_not_readable

# Settings that name files of initial word vectors, which training replaces by its own.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")

_REMEDY = (
    "Give text in UTF-8: a first line 'WORDS DIMENSIONS', then a word and its numbers in each "
    "line; or drop --encoder-embed-path and --decoder-embed-path."
)


def explain_file(parse_embedding: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``parse_embedding``.

    Args:
        parse_embedding: fairseq's function.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(parse_embedding)
    def parse_or_explain(embed_path: str) -> Dict[str, torch.Tensor]:
        obstacle = why_not_readable(embed_path)
        if obstacle is not None and os.path.exists(embed_path):
            raise DataError(f"a file of word vectors at {embed_path}", obstacle, _REMEDY)
        try:
            return dict(parse_embedding(embed_path))
        except (StopIteration, ValueError) as error:
            found = "an empty file" if isinstance(error, StopIteration) else str(error)
            raise DataError(f"word vectors in {embed_path}", found, _REMEDY) from error

    return parse_or_explain


def check_width(load_embedding: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_embedding``, which copies vectors into a table.

    Args:
        load_embedding: fairseq's function.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(load_embedding)
    def check_and_load(embed_dict: Dict[str, torch.Tensor], vocab: Any, embedding: Any) -> Any:
        width = embedding.weight.size(1)
        for word in vocab.symbols:
            if word in embed_dict and embed_dict[word].numel() != width:
                raise ConfigurationError(
                    f"word vectors of {width} numbers, the width of the embedding table",
                    f"{embed_dict[word].numel()} numbers for {word!r}",
                    "Set --encoder-embed-dim and --decoder-embed-dim to the width of the vectors "
                    "in the file, or give another.",
                )
        return load_embedding(embed_dict, vocab, embedding)

    return check_and_load


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
    reason="An empty or malformed file of word vectors, or vectors of another width, fail without "
    "the name of the file; and checkpoints cannot be loaded where the file is missing.",
    install=replaces(
        {
            "fairseq.checkpoint_utils:load_checkpoint_to_cpu": forget_files,
            "fairseq.utils:parse_embedding": explain_file,
            "fairseq.utils:load_embedding": check_width,
        }
    ),
)
