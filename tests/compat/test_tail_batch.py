from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from tests.compat.conftest import SENTENCES
from tests.compat.fairseq_process import FairseqProcess


def all_batches(
    grid: List[Tuple[int, int]], vector: bool, limits: Dict[str, Any]
) -> List[List[List[int]]]:
    """The batches of several counts of sentences and multiples of the batch size."""
    import numpy as np
    from fairseq.data import data_utils

    def num_tokens(index: int) -> int:
        return 1 + index % 7

    found = []
    for count, multiple in grid:
        sizes = np.array([num_tokens(index) for index in range(count)], dtype=np.int64)
        batches = data_utils.batch_by_size(
            np.arange(count),
            num_tokens,
            num_tokens_vec=sizes if vector else None,
            required_batch_size_multiple=multiple,
            **limits,
        )
        found.append([[int(index) for index in batch] for batch in batches])
    return found


@pytest.mark.parametrize("vector", [True, False], ids=["sizes as array", "sizes as function"])
@pytest.mark.parametrize(
    "limits",
    [{"max_sentences": 16}, {"max_tokens": 50}, {"max_tokens": 50, "max_sentences": 24}],
    ids=str,
)
def test_every_sentence_is_in_one_batch(
    patched: FairseqProcess, limits: Dict[str, Any], vector: bool
) -> None:
    grid = [(count, multiple) for count in (5, 16, 99, 100) for multiple in (1, 3, 8)]
    found = patched.call(all_batches, grid=grid, vector=vector, limits=limits)
    for (count, _), batches in zip(grid, found):
        assert [index for batch in batches for index in batch] == list(range(count))
        assert all(0 < len(batch) <= limits.get("max_sentences", count) for batch in batches)


@pytest.mark.parametrize("vector", [True, False])
def test_the_batches_that_fairseq_keeps_are_unchanged(
    bare: FairseqProcess, patched: FairseqProcess, vector: bool
) -> None:
    given = {"grid": [(100, 8)], "vector": vector, "limits": {"max_sentences": 16}}
    (kept,), (whole,) = bare.call(all_batches, **given), patched.call(all_batches, **given)
    assert whole[: len(kept)] == kept
    if sum(map(len, kept)) == 100:
        pytest.skip("this fairseq drops no sentence")
    assert sum(map(len, kept)) == 96
    assert sum(map(len, whole)) == 100


def test_an_empty_set_has_no_batches(patched: FairseqProcess) -> None:
    given = {"grid": [(0, 8)], "vector": False, "limits": {"max_sentences": 16}}
    assert patched.call(all_batches, **given) == [[]]


def test_batches_of_fixed_shapes_are_passed_on() -> None:
    """What fairseq leaves out there fits none of the shapes."""
    import numpy as np

    from spectral_fairseq.compat.data import keep_tail

    kept = [np.array([0, 2]), np.array([1])]  # not consecutive: their lengths say nothing

    def batch_by_size(indices: Any, num_tokens_fn: Any, **options: Any) -> List[Any]:
        return kept

    shapes = np.array([[2, 7], [1, 9]])
    patched = keep_tail(batch_by_size)
    assert patched(np.arange(5), len, fixed_shapes=shapes) is kept
    assert [batch.tolist() for batch in patched(np.arange(5), len)] == [[0, 2], [1], [3, 4]]


def validated(data: str, multiple: int) -> int:
    """Sentences that a pass over the validation set visits, through task and iterator."""
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    settings = TranslationConfig(data=data, source_lang="de", target_lang="en")
    settings.dataset_impl, settings.train_subset = "mmap", "train"
    settings.required_seq_len_multiple = 1
    task = TranslationTask.setup_task(settings)
    task.load_dataset("valid")
    iterator = task.get_batch_iterator(
        task.dataset("valid"), max_sentences=16, required_batch_size_multiple=multiple
    ).next_epoch_itr(shuffle=False)
    return sum(batch["nsentences"] for batch in iterator)


def test_validation_visits_all_sentences(
    bare: FairseqProcess, patched: FairseqProcess, data: Path
) -> None:
    assert patched.call(validated, data=str(data), multiple=8) == SENTENCES
    seen = bare.call(validated, data=str(data), multiple=8)
    if seen == SENTENCES:
        pytest.skip("this fairseq drops no sentence")
    assert seen == 96


@pytest.mark.parametrize("batch_size", [7, 128])
def test_100_in_100_translated(
    patched: FairseqProcess, data: Path, checkpoint: Path, tmp_path: Path, batch_size: int
) -> None:
    flags = ["--beam", "1", "--max-len-b", "3", "--cpu", "--results-path", str(tmp_path)]
    patched.cli(
        "fairseq_cli.generate", data, "--path", checkpoint, "--batch-size", batch_size, *flags
    )
    written = (tmp_path / "generate-test.txt").read_text().splitlines()
    numbers = sorted(int(line.split("\t")[0][2:]) for line in written if line.startswith("H-"))
    assert numbers == list(range(SENTENCES))
