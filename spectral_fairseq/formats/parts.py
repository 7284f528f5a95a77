"""Files of parallel processes, which hold parts of tables, told by their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Sequence, Tuple

from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.files import names_in

# Parallel processes hold a piece of each table. The names of their files or folders have a word for
# it and a number: consolidated.00.pth (Llama), mp_rank_00_001 (Megatron, DeepSpeed),
# checkpoint_best-model_part-0.pt (fairseq).
_PART = re.compile(
    r"(?<![a-z])(consolidated|(?:zero_pp_|mp_|tp_|pp_)?rank|(?:model_)?part|shard|tp|mp|gpu)"
    r"([-_.]?)(\d+(?:_\d+)?)(?![\da-z])",
    re.IGNORECASE,
)
# Those that number from 0 and say by it that there are others: rank-8 may be a model's own name.
_FROM_ZERO = ("consolidated", "model_part", "mp_rank", "tp_rank")
# A layer of a pipeline of DeepSpeed, which has a file for each.
_ONE_LAYER = re.compile(r"layer_\d+-model_\d+-model_states")

PUT_TOGETHER = (
    "Put the parts together with the converter of the program that wrote them (transformers has "
    "one for Llama, Megatron-LM its own). If the file holds whole tables, give it alone under "
    "another name."
)


def check_no_part(file: Path) -> None:
    """Refuse what one of several parallel processes saved, of which no table need be whole.

    Args:
        file: whose name, or that of its folder, may number the processes.

    Raises:
        CheckpointError: by its name or those beside it, it is one of several.
    """
    why = _part_by_name(file)
    if why:
        raise CheckpointError(f"a whole model in {file}", why, PUT_TOGETHER)


def _part_by_name(file: Path) -> str:
    if _ONE_LAYER.match(file.name):
        return "one layer of a pipeline, by its name"
    place = file if _PART.search(file.name) else file.parent
    words = {word.lower() for word, *_ in _PART.findall(place.name)}
    from_zero = not words.isdisjoint(_FROM_ZERO)
    # Folders such as rank_1 and rank_2 may be those of trainings; Megatron's are called otherwise.
    if not words or (place is not file and not from_zero):
        return ""
    several = [
        _part_numbers(name)
        for name in names_in(place.absolute().parent)
        if _pattern(name) == _pattern(place.name)
    ]
    # Any other numbering, such as one by size, begins elsewhere.
    lowest = max(map(min, zip(*several)), default=0)
    if len(several) > 1 and lowest < 2:
        return f"one of {len(several)} parts, by the names beside {place.name}"
    is_first = not any(_part_numbers(place.name))
    return "" if is_first or not from_zero else f"a part that {place.name} numbers"


def _pattern(name: str) -> str:
    return _PART.sub(lambda part: f"{part[1]}{part[2]}#", name)


def _part_numbers(name: str) -> Tuple[int, ...]:
    return tuple(int(digits) for _, _, part in _PART.findall(name) for digits in part.split("_"))


def check_same_part(paths: Sequence[Path]) -> None:
    """Refuse files of several parallel processes where one model of several times is meant.

    Raises:
        CheckpointError: their names have different numbers of a part.
    """
    for path in paths[1:]:
        if _part_numbers(path.name) != _part_numbers(paths[0].name):
            raise CheckpointError(
                f"checkpoints of the same part of a model as {paths[0].name}",
                f"{path.name}, which another process saved",
                "Name the checkpoints of one process, and treat each process alike.",
            )
