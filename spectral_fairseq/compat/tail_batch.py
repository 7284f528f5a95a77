"""The last batch is trained on, evaluated and translated like the others."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

import numpy as np

from spectral_fairseq.compat.patching import Patch, replaces, wrapping


def _unneeded_tail_batch() -> Optional[str]:
    from fairseq.data import data_utils

    kept_all = _sentences_kept(data_utils.batch_by_size) == 3
    return "this fairseq batches all sentences" if kept_all else None


def _install() -> str:
    from fairseq.data import data_utils

    # Datasets import data_utils inside their own batch_by_size, so this one name is enough.
    changed = replaces({"fairseq.data.data_utils:batch_by_size": keep_tail})()
    if _sentences_kept(data_utils.batch_by_size) != 3:
        raise RuntimeError("it drops sentences in a way that is not known here")
    return changed


def _sentences_kept(batch_by_size: Callable[..., List[np.ndarray]]) -> int:
    batches = batch_by_size(
        np.arange(3),
        num_tokens_fn=lambda _: 1,
        max_sentences=2,
        required_batch_size_multiple=2,
    )
    return sum(len(batch) for batch in batches)


@wrapping
def keep_tail(
    indices: Any,
    num_tokens_fn: Callable[[int], int],
    num_tokens_vec: Any = None,
    max_tokens: Optional[int] = None,
    max_sentences: Optional[int] = None,
    required_batch_size_multiple: int = 1,
    fixed_shapes: Any = None,
    *,
    original: Callable[..., List[np.ndarray]],
) -> List[np.ndarray]:
    """Wrap a ``batch_by_size`` so that its batches cover all indices.

    The compiled batching cuts the index array into consecutive slices; what fairseq removes
    afterwards is therefore exactly the end of the array.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if len(indices) == 0:
        return []  # fairseq looks at the last batch, which an empty set does not have
    batches = original(
        indices,
        num_tokens_fn,
        num_tokens_vec=num_tokens_vec,
        max_tokens=max_tokens,
        max_sentences=max_sentences,
        required_batch_size_multiple=required_batch_size_multiple,
        fixed_shapes=fixed_shapes,
    )
    if fixed_shapes is not None:
        return batches
    batched = sum(len(batch) for batch in batches)
    return list(batches) + ([indices[batched:]] if batched < len(indices) else [])


TAIL_BATCH = Patch(
    name="tail batch",
    reason="The last batch is dropped unless its length is a multiple of "
    "--required-batch-size-multiple, so that sentences are neither translated nor evaluated.",
    install=_install,
    unneeded=_unneeded_tail_batch,
)
