"""A file of word vectors that cannot be used ends in an error that names it and the line.

This patch only changes error messages. It is worth its lines because fairseq answers an empty file
with ``StopIteration``, and vectors of another width with torch's complaint about a copy.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Dict

import torch

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.files import why_not_readable

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


PATCH = Patch(
    name="embedding file",
    reason="An empty or malformed file of word vectors, or vectors of another width, fail without "
    "the name of the file.",
    install=replaces(
        {
            "fairseq.utils:parse_embedding": explain_file,
            "fairseq.utils:load_embedding": check_width,
        }
    ),
)
