from __future__ import annotations

from pathlib import Path
from typing import List

from tests.compat.fairseq_process import FairseqProcess


def killed_while_copying(folder: str) -> List[str]:
    """Overwrite a good file by a copy that dies half way; what the target holds, and its link."""
    import os
    import shutil
    from unittest import mock

    from fairseq.file_io import PathManager

    source, target, link = (os.path.join(folder, n) for n in ("source.pt", "best.pt", "link.pt"))
    for path, text in ((source, "new new"), (target, "old old")):
        with open(path, "w") as file:
            file.write(text)
    os.symlink(target, link)

    def half(src: str, dst: str) -> None:
        with open(dst, "w") as file:
            file.write("new")
        raise KeyboardInterrupt

    found = []
    with mock.patch.object(shutil, "copyfile", half):
        try:
            PathManager.copy(source, link, overwrite=True)
        except KeyboardInterrupt:
            found.append(open(target).read())
    assert PathManager.copy(source, link, overwrite=True)
    return found + [open(target).read(), str(os.path.islink(link))]


def test_the_old_file_survives(
    bare: FairseqProcess, patched: FairseqProcess, tmp_path: Path
) -> None:
    for name in ("bare", "patched"):
        (tmp_path / name).mkdir()
    destroyed = bare.call(killed_while_copying, folder=str(tmp_path / "bare"))
    kept = patched.call(killed_while_copying, folder=str(tmp_path / "patched"))
    assert destroyed == ["new", "new new", "True"]
    assert kept == ["old old", "new new", "True"]
