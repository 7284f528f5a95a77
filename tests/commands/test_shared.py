"""What subcommands share: outputs written whole or refused, and checksums that are looked at."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.commands.shared import (
    check_output,
    check_output_folder,
    naming_full_disk,
    save_atomically,
    text_with_sentences,
)
from spectral_fairseq.errors import ConfigurationError, OutputError
from tests.checkpoints.made import flipped
from tests.language_models import block_checkpoint, stateful_checkpoint


def test_a_folder_that_is_not_writable_is_refused_before_any_work(tmp_path, monkeypatch):
    # Not by its permissions, which do not bind a superuser.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigurationError, match="which cannot"):
        check_output(tmp_path / "out.pt", [], overwrite=False)
    (tmp_path / "inner").mkdir()
    assert check_output(tmp_path / "inner" / "out.pt", [], overwrite=False)


@pytest.mark.parametrize("name", ["file", "-"])
def test_the_mark_that_windows_puts_in_front_of_a_text_is_no_part_of_it(
    name, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("\ufeffone line\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", open("file", encoding="utf-8"))  # noqa: SIM115
    assert text_with_sentences(name, "--sentences") == "one line\n"


def test_a_folder_that_cannot_be_replaced_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert check_output_folder("empty", [], ["config.json"], False) == Path("empty")
    with pytest.raises(ConfigurationError, match="the working directory.*inside it"):
        check_output_folder(tmp_path, [], ["config.json"], False)
    monkeypatch.setattr("os.path.ismount", lambda path: path == Path("empty"))
    with pytest.raises(ConfigurationError, match="a mounted folder.*inside it"):
        check_output_folder("empty", [], ["config.json"], False)


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "link.pt", tmp_path / "disk" / "out.pt"
    link.symlink_to(target)
    for _ in range(2):
        save_atomically({"a": 1}, check_output(link, [], overwrite=True))
        assert link.is_symlink() and not target.is_symlink() and torch.load(target) == {"a": 1}
    assert sorted(tmp_path.rglob("*.pt")) == [target, link]
    with pytest.raises(ConfigurationError, match="no such folder"):
        astray = tmp_path / "astray.pt"
        astray.symlink_to(tmp_path / "absent" / "out.pt")
        check_output(astray, [], overwrite=True)


WRITERS = {"average": ("--output",), "export": ()}


@pytest.fixture
def source(train, tmp_path):
    """A checkpoint in a folder of its own."""
    return Path(shutil.copy(block_checkpoint(train), tmp_path / "in.pt"))


@pytest.mark.parametrize("writer", WRITERS)
def test_no_input_is_replaced_and_nothing_else_unasked(writer, source, command, tmp_path):
    link, out, argv = tmp_path / "link.pt", tmp_path / "out.pt", (writer, source, *WRITERS[writer])
    link.symlink_to(source)
    content = source.read_bytes()
    for same in (source, link):
        assert "an output that is not an input" in command(*argv, same, "--overwrite", rc=2)
    assert "found a folder" in command(*argv, tmp_path, "--overwrite", rc=2)
    assert "no such folder" in command(*argv, tmp_path / "no" / "out.pt", rc=2)
    out.write_text("precious")
    assert "--overwrite" in command(*argv, out, rc=2) and out.read_text() == "precious"
    command(*argv, out, "--overwrite")
    assert load_checkpoint(out)["model"] and source.read_bytes() == content
    assert sorted(tmp_path.iterdir()) == [source, link, out]


@pytest.mark.parametrize("writer", WRITERS)
def test_the_same_command_writes_the_same_bytes(writer, source, command, tmp_path):
    """The random name of the partial file was in the archive."""
    made = [tmp_path / "one.pt", tmp_path / "two.pt"]
    for out in made:
        command(writer, source, *WRITERS[writer], out)
    assert made[0].read_bytes() == made[1].read_bytes()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("size", [0, 4096])
def test_a_full_disk_is_named(writer, size, source, command, tmp_path):
    """A limit on the size of files stands for it."""
    resource, out = pytest.importorskip("resource"), tmp_path / "out.pt"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        error = command(writer, source, *WRITERS[writer], out, rc=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search("out.pt to be written; .*(too large|no space).*Free some", error)
    assert sorted(tmp_path.iterdir()) == [source]


# torch's writer reports a full disk as an error of its own, also where it closes the archive.
OF_TORCH = RuntimeError, "[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0"
OF_DISK = OSError, "disk full"


@pytest.mark.parametrize("errors, said", [
    ([OF_TORCH], "found no space left.*Free some"),
    ([OF_DISK], "disk full"),
    ([OF_DISK, OF_TORCH], "disk full"),
])  # fmt: skip
@pytest.mark.parametrize("writer", WRITERS)
def test_a_failed_write_leaves_the_old_file(
    writer, errors, said, source, command, tmp_path, monkeypatch
):
    out = tmp_path / "out.pt"
    out.write_text("precious")

    def fail(checkpoint, file, **options):
        file.write(b"half")
        (kind, text), *later = errors
        try:
            raise kind(text)
        finally:
            for kind, text in later:
                raise kind(text)

    monkeypatch.setattr(torch, "save", fail)
    error = command(writer, source, *WRITERS[writer], out, "--overwrite", rc=2)
    assert re.search(f"out.pt to be written; .*{said}", error)
    assert out.read_text() == "precious" and sorted(tmp_path.iterdir()) == [source, out]


COMMANDS = {
    "analyze": ("{}",),
    "compare": ("{}", "{}"),
    "export": ("{}", "{}.out"),
    "average": ("{}", "--output", "{}.out"),
    "evaluate-lm": ("{}", "DATA", "--cpu"),
    "next-words": ("{}", "--data", "DATA", "--sentences", "DATA/sentences"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_damage_is_found_unless_told_otherwise(name, command, train, tiny_lm_data, tmp_path):
    path = tmp_path / "flipped.pt"
    made = stateful_checkpoint if name == "evaluate-lm" else block_checkpoint
    shutil.copy(made(train), path)
    flipped(path, "data/0")
    data = tmp_path / "data"
    shutil.copytree(tiny_lm_data, data)
    (data / "sentences").write_text("w3 w1\n", "utf-8")
    argv = [one.format(path).replace("DATA", str(data)) for one in COMMANDS[name]]
    error = command(name, *argv, rc=2)
    assert "checksum" in error and "see --no-verify" in error
    command(name, *argv, "--no-verify")


@pytest.mark.parametrize(
    "error, named",
    [
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("unexpected pos 128 vs 0"), "no space left"),
        (Exception("I/O error: No space left on device (os error 28)"), "No space left"),  # Rust's
        (RuntimeError("sizes differ"), None),
        (KeyError("name"), None),
    ],
)
def test_errors_of_writers_that_the_system_refused(error, named):
    raised = type(error) if named is None else OutputError
    with pytest.raises(raised, match=named and f"out to be written; found .*{named}.*elsewhere"):
        with naming_full_disk("out", "write elsewhere"):
            raise error
