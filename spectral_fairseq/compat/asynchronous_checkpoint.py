"""A checkpoint that is written in the background holds what was saved.

``--write-checkpoints-asynchronously`` hands torch a file of ioPath, which notes each buffer that it
is given and writes it later, in a thread. torch 2 gives it views of memory that it reuses at once.
Here the file is made in memory, and ioPath gets it as one buffer that nobody changes.
"""

from __future__ import annotations

import io
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces, wrapping


@wrapping
def save_whole(
    obj: Any, filename: str, async_write: bool = False, *, original: Callable[..., None]
) -> None:
    """Wrap ``torch_persistent_save``: in the background it writes one buffer."""
    if not async_write:
        original(obj, filename)
        return
    import torch
    from fairseq.file_io import PathManager

    whole = io.BytesIO()
    torch.save(obj, whole)
    with PathManager.opena(filename, "wb") as file:
        file.write(whole.getvalue())


ASYNCHRONOUS_CHECKPOINT = Patch(
    name="asynchronous checkpoint",
    reason="With --write-checkpoints-asynchronously torch 2 reuses the memory from which ioPath "
    "writes a file later: every checkpoint is damaged, which nobody sees before it is read.",
    install=replaces({"fairseq.checkpoint_utils:torch_persistent_save": save_whole}),
)
