"""Translation data in several parts are read without ``--upsample-primary``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import List

import pytest

from tests.compat.conftest import SENTENCES, train_arguments
from tests.compat.fairseq_process import Failure, FairseqProcess


@pytest.fixture
def parts(data: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(data, tmp_path / "parts"))
    for split in ("train", "valid"):
        for path in [*folder.glob(f"{split}.de-en.*")]:
            shutil.copy(path, folder / path.name.replace(split, f"{split}1", 1))
    return folder


def sizes(ratios: List[int]) -> List[int]:
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
def test_the_first_part_is_repeated_as_asked(
    ratio: int, expected: List[int], patched: FairseqProcess
) -> None:
    assert patched.call(sizes, ratios=[ratio, 1]) == expected


def loaded(folder: str, arguments: List[str]) -> int:
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    args = options.parse_args_and_arch(options.get_training_parser(), [folder, *arguments])
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    task.load_dataset("train", combine=True)
    return len(task.dataset("train").ordered_indices())


def test_a_task_reads_every_part(
    bare: FairseqProcess, patched: FairseqProcess, parts: Path
) -> None:
    call = {"folder": str(parts), "arguments": ["--arch", "transformer"]}
    with pytest.raises(Failure, match="negative dimensions"):
        bare.call(loaded, **call)
    assert patched.call(loaded, **call) == 2 * SENTENCES


def test_training(patched: FairseqProcess, parts: Path, tmp_path: Path) -> None:
    more = ("--max-epoch", "1", "--combine-valid-subsets")
    patched.cli("fairseq_cli.train", *train_arguments(parts, tmp_path / "saved", *more))
    assert (tmp_path / "saved" / "checkpoint_last.pt").is_file()
