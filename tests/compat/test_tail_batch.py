"""The last batch is trained on and translated."""

import numpy as np
import pytest

from spectral_fairseq.compat.tail_batch import keep_tail
from tests.compat.conftest import SENTENCES


def all_batches(grid, vector, limits):
    """The batches of several counts of sentences and multiples of the batch size."""
    import numpy as np
    from fairseq.data import data_utils

    def num_tokens(index):
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
@pytest.mark.parametrize("limits", [
    {"max_sentences": 16}, {"max_tokens": 50}, {"max_tokens": 50, "max_sentences": 24},
], ids=str)  # fmt: skip
def test_every_sentence_is_in_one_batch(patched, limits, vector):
    grid = [(count, multiple) for count in (0, 5, 16, 99, 100) for multiple in (1, 3, 8)]
    found = patched.call(all_batches, grid=grid, vector=vector, limits=limits)
    for (count, _), batches in zip(grid, found):
        assert [index for batch in batches for index in batch] == list(range(count))
        assert all(0 < len(batch) <= limits.get("max_sentences", count) for batch in batches)


@pytest.mark.parametrize("vector", [True, False])
def test_the_batches_that_fairseq_keeps_are_unchanged(bare, patched, vector):
    given = {"grid": [(100, 8)], "vector": vector, "limits": {"max_sentences": 16}}
    (kept,), (whole,) = bare.call(all_batches, **given), patched.call(all_batches, **given)
    assert whole[: len(kept)] == kept
    if sum(map(len, kept)) == 100:
        pytest.skip("this fairseq drops no sentence")
    assert sum(map(len, kept)) == 96
    assert sum(map(len, whole)) == 100


def test_batches_of_fixed_shapes_are_passed_on():
    """What fairseq leaves out there fits none of the shapes."""
    kept = [np.array([0, 2]), np.array([1])]  # not consecutive: their lengths say nothing

    def batch_by_size(indices, num_tokens_fn, **options):
        return kept

    shapes = np.array([[2, 7], [1, 9]])
    patched = keep_tail(batch_by_size)
    assert patched(np.arange(5), len, fixed_shapes=shapes) is kept
    assert [batch.tolist() for batch in patched(np.arange(5), len)] == [[0, 2], [1], [3, 4]]


@pytest.mark.parametrize("batch_size", [7, 128])
def test_100_in_100_translated(patched, data, checkpoint, tmp_path, batch_size):
    flags = ["--beam", "1", "--max-len-b", "3", "--cpu", "--results-path", str(tmp_path)]
    patched.cli(
        "fairseq_cli.generate", data, "--path", checkpoint, "--batch-size", batch_size, *flags
    )
    written = (tmp_path / "generate-test.txt").read_text().splitlines()
    numbers = sorted(int(line.split("\t")[0][2:]) for line in written if line.startswith("H-"))
    assert numbers == list(range(SENTENCES))
