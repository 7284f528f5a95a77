"""A split in several parts (train, train1, ...) is read with each part once.

The tasks of translation repeat the first part ``--upsample-primary`` times. Its default of -1
means "no repetition", but reaches the dataset as it is.
"""

from __future__ import annotations

from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces, wrapping


@wrapping
def repeated_once(
    self: Any, datasets: Any, sample_ratios: Any = 1, *, original: Callable[..., None]
) -> None:
    """Wrap ``ConcatDataset.__init__`` so that a negative ratio is 1."""
    if not isinstance(sample_ratios, int):
        sample_ratios = [1 if ratio < 0 else ratio for ratio in sample_ratios]
    original(self, datasets, sample_ratios)


SEVERAL_PARTS = Patch(
    name="data in several parts",
    reason="Translation data in several parts (train, train1, ...; --combine-valid-subsets) fail "
    "with 'negative dimensions are not allowed' unless --upsample-primary is given.",
    install=replaces({"fairseq.data.concat_dataset:ConcatDataset.__init__": repeated_once}),
)
