"""Data in several parts, without ``--upsample-primary``."""

import shutil

import pytest

from tests.compat.conftest import SENTENCES, train_arguments
from tests.compat.fairseq_process import Fails


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
