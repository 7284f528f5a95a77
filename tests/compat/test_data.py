"""Patches of how fairseq reads data: all of it, in its parts, and undamaged."""

import os
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from spectral_fairseq.compat.data import check_indexed_files, keep_tail
from spectral_fairseq.errors import DataError
from tests.compat.conftest import SENTENCES, train_arguments
from tests.compat.fairseq_process import Fails

WORDS = 24  # of the dictionary of the fixture `data`


@pytest.fixture
def copy(data, tmp_path):
    return Path(shutil.copytree(data, tmp_path / "copy"))


# The last batch


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


# Data in several parts, without ``--upsample-primary``


@pytest.fixture
def parts(copy):
    for split in ("train", "valid"):
        for path in [*copy.glob(f"{split}.de-en.*")]:
            shutil.copy(path, copy / path.name.replace(split, f"{split}1", 1))
    return copy


def sizes(ratios):
    import numpy as np
    from fairseq.data import ConcatDataset, ListDataset

    first, second = ListDataset([10, 11], np.array([3, 4])), ListDataset([12], np.array([5]))
    both = ConcatDataset([first, second], ratios)
    assert len(both) == len(both.sizes)
    return [both[index] for index in range(len(both))]


@pytest.mark.parametrize("ratio, expected", [
    (-1, [10, 11, 12]),
    (0, [12]),
    (1, [10, 11, 12]),
    (2, [10, 11, 10, 11, 12]),
])  # fmt: skip
def test_the_first_part_is_repeated_as_asked(ratio, expected, patched):
    patched.gives(expected, sizes, ratios=[ratio, 1])


def loaded(folder, arguments):
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    args = options.parse_args_and_arch(options.get_training_parser(), [folder, *arguments])
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    task.load_dataset("train", combine=True)
    return len(task.dataset("train").ordered_indices())


def test_a_task_reads_every_part_and_trains(bare, patched, parts, tmp_path):
    call = {"folder": str(parts), "arguments": ["--arch", "transformer"]}
    bare.gives(Fails("negative dimensions"), loaded, **call)
    patched.gives(2 * SENTENCES, loaded, **call)
    more = ("--max-epoch", "1", "--combine-valid-subsets")
    patched.cli("fairseq_cli.train", *train_arguments(parts, tmp_path / "saved", *more))
    assert (tmp_path / "saved" / "checkpoint_last.pt").is_file()


# Binarised data that are cut, of another format, or of another dictionary


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def change(path, place, form, value):
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, place, value)
    path.write_bytes(bytes(content))


def replaced_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def without_sentences(path):
    path.write_bytes(path.read_bytes()[:18] + bytes(8))


# How a split's file is damaged, and what the error says. The header of an index has 26 bytes.
BIN_OF_ANOTHER = f"the {WORDS} words of the dictionary in .*; found {WORDS}"
DAMAGES = {
    "bin cut": (cut, (101,), "within the 101 bytes"),
    "bin empty": (cut, (0,), "within the 0 bytes"),
    "bin missing": (Path.unlink, (), "both files of the split"),
    "bin a pipe": (replaced_by_pipe, (), "a device or a pipe"),
    "bin of another dictionary": (change, (4, "<H", WORDS), BIN_OF_ANOTHER),
    "idx cut": (cut, (333,), "333 bytes with a wrong header or length"),
    "idx cut in the header": (cut, (12,), "12 bytes with a wrong header or length"),
    "idx empty": (cut, (0,), "the first bytes b''"),
    "idx of bad magic": (change, (0, "<B", 0), "an index of fairseq-preproc"),
    "idx of another version": (change, (9, "<Q", 2), "header or length"),
    "idx of floats": (change, (17, "<B", 7), "header or length"),
    "idx of huge count": (change, (18, "<Q", 2**62), "header or length"),
    "idx of negative length": (change, (26, "<i", -5), "negative length"),
    "idx of huge length": (change, (26, "<i", 2**30), "that ends at byte"),
    "idx of negative place": (change, (-8, "<q", -2), "negative length"),
    "idx without sentences": (without_sentences, (), "at least one sentence"),
}


def read_all(prefix, dictionary):
    """Open a split as tasks do, and look up every token."""
    import torch
    from fairseq.data import Dictionary, data_utils

    words = Dictionary.load(dictionary)
    split = data_utils.load_indexed_dataset(prefix, words)
    table = torch.zeros(len(words), 1)
    return sum(len(table[split[number]]) for number in range(len(split)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage, copy):
    apply, values, match = DAMAGES[damage]
    prefix, ending = str(copy / "train.de-en.de"), damage[:3]
    check_indexed_files(prefix, WORDS)
    apply(Path(f"{prefix}.{ending}"), *values)
    with pytest.raises(DataError, match=match) as caught:
        check_indexed_files(prefix, WORDS)
    assert f"train.de-en.de.{ending}" in str(caught.value)


@pytest.mark.parametrize("damage", ["bin cut", "bin of another dictionary", "idx cut"])
def test_a_task_that_opens_it_is_told(damage, bare, patched, copy):
    apply, values, match = DAMAGES[damage]
    files = {"prefix": str(copy / "train.de-en.de"), "dictionary": str(copy / "dict.de.txt")}
    assert patched.call(read_all, **files) > 500
    apply(copy / f"train.de-en.de.{damage[:3]}", *values)
    assert "DataError" not in bare.gives(Fails(), read_all, **files).kinds
    patched.gives(Fails(match, "DataError"), read_all, **files)


def older_format(prefix, sentences):
    """Write a split as fairseq did before --dataset-impl mmap."""
    from fairseq.data.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for sentence in sentences:
        builder.add_item(sentence)
    builder.data_offsets = [int(offset) for offset in builder.data_offsets]
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("ending, apply, values", [
    ("bin", cut, (5,)),
    ("idx", cut, (90,)),
    ("idx", change, (32, "<Q", 2**61)),  # the header
    ("idx", change, (80, "<q", 2**40)),  # offsets
    ("bin", change, (0, "<i", 0)),  # a token
])  # fmt: skip
def test_the_older_format(ending, apply, values, tmp_path):
    prefix = tmp_path / "train"
    older_format(prefix, [torch.tensor([4, 9, 2]), torch.tensor([5, 2])])
    check_indexed_files(str(prefix), 10)
    with pytest.raises(DataError, match="found 9"):
        check_indexed_files(str(prefix), 9)
    apply(Path(f"{prefix}.{ending}"), *values)
    with pytest.raises(DataError, match=str(prefix)):
        check_indexed_files(str(prefix), 10)


@pytest.mark.parametrize("line, match", [
    ("w -3", "-3 of 'w'"),
    (f"w {2**63}", f"{2**63} of 'w'"),
    ("w \u00b2", "Incorrect dictionary format"),
    ("w " + "9" * 5000, "Incorrect dictionary format|9999 of 'w'|99999"),
    ("w7011", "Incorrect dictionary format.*w7011"),
    ("w0 1", "Duplicate word"),
    ("\udcff 1", "Incorrect encoding"),
])  # fmt: skip
def test_dictionaries(patched, copy, line, match):
    with open(copy / "dict.de.txt", "ab") as file:
        file.write(f"{line}\n".encode("utf-8", "surrogateescape"))
    files = {"prefix": str(copy / "train.de-en.de"), "dictionary": str(copy / "dict.de.txt")}
    failure = patched.gives(Fails(match), read_all, **files)
    assert failure.kinds[0] == "DataError" and "dict.de.txt" in failure.message
    assert "\n" not in failure.message


@pytest.mark.parametrize("make, match", [
    (os.mkfifo, "a device or a pipe"),
    (lambda path: path.symlink_to(path.name), "a link that leads nowhere"),
])  # fmt: skip
def test_a_dictionary_that_is_no_file(make, match, patched, copy):
    path = copy / "dict.de.txt"
    path.unlink()
    make(path)
    begin = time.monotonic()
    patched.gives(Fails(match), read_all, prefix="none", dictionary=str(path))
    assert time.monotonic() - begin < 60  # for a pipe fairseq waits


def combined(folder):
    from fairseq.data import Dictionary, data_utils

    words = Dictionary.load(f"{folder}/dict.de.txt")
    return len(data_utils.load_indexed_dataset(f"{folder}/train", words, combine=True))


def test_combined_splits_are_all_checked(patched, copy):
    for number in ("", "1"):
        for ending in ("bin", "idx"):
            shutil.copy(copy / f"train.de-en.de.{ending}", copy / f"train{number}.{ending}")
    assert np.fromfile(copy / "train1.bin", np.uint16).max() < WORDS
    change(copy / "train1.bin", 0, "<H", 999)
    patched.gives(Fails("train1.bin; found 999"), combined, folder=str(copy))


# Nothing that the model can read


def pieces(folder, flags, positions, context=0):
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_eval_lm_parser()
    args = options.parse_args_and_arch(parser, [folder, "--path", "x", *flags])
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    return len(
        task.eval_lm_dataloader(
            dataset=dataset, max_tokens=600, max_positions=positions, context_window=context
        )
    )


def skipping(folder, positions):
    """The batches of validation sentences by a task of translation that skips long ones."""
    import numpy as np
    import torch
    from fairseq.data import Dictionary, LanguagePairDataset
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    words = Dictionary.load(f"{folder}/dict.de.txt")
    task = TranslationTask(TranslationConfig(), words, words)
    lines = [torch.full((length,), 5) for length in (4, 6)]
    dataset = LanguagePairDataset(lines, np.array([4, 6]), words)
    batches = task.get_batch_iterator(
        dataset, max_positions=positions, max_sentences=1, ignore_invalid_inputs=True
    )
    return len(batches)


def test_sentences_that_are_all_skipped(bare, patched, data):
    for sides, batches in ((bare, {3: 0, 5: 1, 8: 2}), (patched, {5: 1, 8: 2})):
        for positions, count in batches.items():
            sides.gives(count, skipping, folder=str(data), positions=positions)
    refused = Fails("2, all skipped, such as one of .* reads 3. .*sentences")
    patched.gives(refused, skipping, folder=str(data), positions=3)


def test_a_text_of_which_every_piece_is_skipped(bare, patched, tmp_path):
    (tmp_path / "text").write_text(" ".join(f"w{i % 20}" for i in range(511)) + "\n", "utf-8")
    pref = str(tmp_path / "text")
    arguments = ["--only-source", "--trainpref", pref, "--validpref", pref]
    patched.cli("fairseq_cli.preprocess", *arguments, "--destdir", tmp_path / "bin")
    text = {"folder": str(tmp_path / "bin"), "positions": 256}
    bare.gives(0, pieces, flags=[], **text)
    refused = Fails("1, all skipped, such as one of 512 tokens.*reads 256.*per-sample")
    patched.gives(refused, pieces, flags=[], **text)
    fitting = {"flags": ["--tokens-per-sample", "64"], **text}
    assert patched.call(pieces, **fitting) > 0
    assert patched.call(pieces, context=16, **fitting) > 0
