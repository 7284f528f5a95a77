"""A checkpoint is copied as a whole or not at all."""


def killed_while_copying(folder):
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

    def half(src, dst):
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


def test_the_old_file_survives_a_copy_that_dies(bare, patched, tmp_path):
    for process, held in ((bare, "new"), (patched, "old old")):
        folder = tmp_path / held
        folder.mkdir()
        process.gives([held, "new new", "True"], killed_while_copying, folder=str(folder))
