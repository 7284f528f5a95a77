"""A damaged split of binarised data is refused before anything is computed from it.

This patch mostly changes error messages. It is worth its lines because a copy that was cut short,
or a dictionary of another run, otherwise fails hours later in the middle of an epoch, if at all: on
a GPU with an assertion that names neither the file nor the token.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any, Callable

from spectral_fairseq.compat.indexed_files import check_indexed_files
from spectral_fairseq.compat.patching import Patch, replaces


def check_first(load_indexed_dataset: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_indexed_dataset``, through which tasks open their splits.

    Args:
        load_indexed_dataset: fairseq's function.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(load_indexed_dataset)
    def check_and_load(
        path: str,
        dictionary: Any = None,
        dataset_impl: Any = None,
        combine: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        words = None if dictionary is None else len(dictionary)
        for number in itertools.count():
            prefix = f"{path}{number or ''}"
            check_indexed_files(prefix, words)
            if not combine or not os.path.exists(f"{prefix}.idx"):
                break
        return load_indexed_dataset(path, dictionary, dataset_impl, combine, *args, **kwargs)

    return check_and_load


PATCH = Patch(
    name="damaged data",
    reason="Binarised data that are cut short, or made with another dictionary, fail in the middle "
    "of training without the name of a file, or give wrong figures.",
    install=replaces({"fairseq.data.data_utils:load_indexed_dataset": check_first}),
)
