"""A model in several files, with an index that says which file holds which tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Dict, Iterator, Mapping

from torch import Tensor

from spectral_fairseq.checkpoints.formats.json_file import read_json_object
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.files import why_not_readable


class Shards(Mapping[str, Tensor]):
    """Name -> tensor, read from the file that the index names, which is opened when it is used.

    Args:
        index: a file such as ``model.safetensors.index.json``.
        read: opens one of the files.

    Raises:
        CheckpointError: the index names something else than files beside it.
        DataError: it is not JSON.
    """

    def __init__(self, index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> None:
        self._index = index
        self._read = read
        self._opened: Dict[str, Mapping[str, Tensor]] = {}
        weight_map = read_json_object(index, "the index of a model in several files").get(
            "weight_map"
        )
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"an entry 'weight_map' with the names of tensors in {index}",
                "none",
                "Copy the index again, or name one of the files that hold the tensors.",
            )
        for file in {str(name) for name in weight_map.values()}:
            self._check(file)
        self._files: Dict[str, str] = {str(name): str(file) for name, file in weight_map.items()}

    def _check(self, file: str) -> None:
        # A name with a folder in it could lead anywhere.
        obstacle = "a path" if Path(file).name != file else None
        obstacle = obstacle or why_not_readable(self._index.parent / file)
        if obstacle is not None:
            raise CheckpointError(
                f"the index {self._index} to name files beside it",
                f"{file[:200]!r}, {obstacle}",
                "Copy the whole folder again.",
            )

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, or the first tensor of a module."""
        held = [
            file
            for key, file in self._files.items()
            if key == name or key.rpartition(".")[0] == name
        ]
        return self._index.parent / held[0]

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = self._read(self._index.parent / file)
        if name not in self._opened[file]:
            raise CheckpointError(
                f"the tensor {name} in {self._index.parent / file}, as its index says",
                f"{len(self._opened[file])} others",
                "The files do not belong together: copy the whole folder again.",
            )
        return self._opened[file][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
