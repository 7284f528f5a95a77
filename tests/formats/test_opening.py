"""The same table in every format: read by its content, whatever the file is called."""

import argparse
import gzip
import json
import lzma
import os
import struct
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from spectral_fairseq.analysis import analyze
from spectral_fairseq.checkpoints.saved import saved_epochs
from spectral_fairseq.errors import CheckpointError, DataError
from spectral_fairseq.files import read_json
from spectral_fairseq.formats.opening import open_model
from tests.checkpoints.made import cone, entries, save, save_dictionary

NAME = "model.embed_tokens.weight"
TABLE = cone(30, 4)
WORDS = [f"w{row}" for row in range(29)] + ["a b"]


def safetensors(path, tensors):
    pytest.importorskip("safetensors.torch").save_file(tensors, path)


def vectors(path, header, lines):
    path.write_bytes(header + b"".join(lines))


def text_lines(end=b"\n"):
    numbers = [" ".join(map(repr, row)) for row in TABLE.tolist()]
    return [f"{word} {row}".encode() + end for word, row in zip(WORDS, numbers)]


def binary_lines(end=b"\n"):
    rows = [row.numpy().tobytes() for row in TABLE]
    return [word.replace(" ", "_").encode() + b" " + row + end for word, row in zip(WORDS, rows)]


def write_lightning(path):
    torch.save({"epoch": 3, "state_dict": {"net." + NAME: TABLE}, "lr": [0.1]}, path)


def write_with_settings(path, **settings):
    torch.save({"model": {NAME: TABLE}, "args": argparse.Namespace(**settings)}, path)


WRITERS = {
    "safetensors": lambda path: safetensors(path, {NAME: TABLE}),
    "state dict": lambda path: torch.save({NAME: TABLE}, path),
    "older state dict": lambda path: torch.save(
        {NAME: TABLE}, path, _use_new_zipfile_serialization=False
    ),
    "training loop": write_lightning,
    "training loop with settings": lambda path: write_with_settings(path, model="vit", lr=0.1),
    "tensor": lambda path: torch.save(TABLE, path),
    "fairseq": lambda path: save(path, entries(TABLE)),
    "fairseq without the trainer's state": lambda path: write_with_settings(
        path, arch="transformer_lm", task="language_modeling"
    ),
    "npy": lambda path: np.save(open(path, "wb"), TABLE.numpy()),
    "npy by columns": lambda path: np.save(open(path, "wb"), np.asfortranarray(TABLE.numpy())),
    "npz": lambda path: np.savez(open(path, "wb"), b=np.zeros(3), Wemb=TABLE.numpy()),
    "npz by columns": lambda path: np.savez(open(path, "wb"), Wemb=TABLE.numpy().T.copy().T),
    "compressed npz": lambda path: np.savez_compressed(open(path, "wb"), Wemb=TABLE.numpy()),
    "word2vec": lambda path: vectors(path, b"30 4\n", text_lines(b" \n")),
    "binary word2vec": lambda path: vectors(path, b"30 4\n", binary_lines()),
    "binary word2vec without line breaks": lambda path: vectors(path, b"30 4\n", binary_lines(b"")),
    "GloVe": lambda path: vectors(path, b"", text_lines()),
}


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("name", ["file", "file.bin"])
def test_every_format_gives_the_same_table(form, name, tmp_path):
    path = tmp_path / name
    WRITERS[form](path)
    opened = open_model(path)
    (table,) = [one for one in opened.tensors.values() if one.dim() == 2]
    assert torch.equal(table, TABLE)
    assert opened.file == path and opened.file_of("any") == path
    words, remark = opened.find_words("any", 30)
    if "word2vec" in form or form == "GloVe":
        assert [word.replace("_", " ") for word in words.symbols] == WORDS
    else:
        assert words is None and remark
    # fairseq's dictionaries put the padding symbol into row 1; other models say where it is.
    assert opened.uncounted == ([1] if form.startswith("fairseq") else [])


@pytest.mark.parametrize("form", ["safetensors", "npy"])
def test_tensors_are_mapped_from_the_file(form, tmp_path):
    path = tmp_path / "file"
    WRITERS[form](path)
    before = path.read_bytes()
    (table,) = [one for one in open_model(path).tensors.values() if one.dim() == 2]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert str(path) in maps.read()
    table.zero_()
    assert path.read_bytes() == before


def test_safetensors_cannot_open_a_name_that_is_no_text(tmp_path):
    WRITERS["safetensors"](tmp_path / "file")
    named = (tmp_path / "file").rename(tmp_path / os.fsdecode(b"caf\xe9"))
    with pytest.raises(CheckpointError, match="name in UTF-8") as refused:
        open_model(named)
    assert "Rename" in str(refused.value)


def sharded(folder, form):
    """A model's folder with an untied table in each of two files."""
    ending = {"safetensors": "safetensors", "torch": "bin"}[form]
    stem = {"safetensors": "model", "torch": "pytorch_model"}[form]
    parts = {NAME: TABLE}, {"lm_head.weight": TABLE + 1, "norm.weight": torch.ones(4)}
    index = {}
    for number, tensors in enumerate(parts, 1):
        file = f"{stem}-0000{number}-of-00002.{ending}"
        (safetensors if form == "safetensors" else lambda p, t: torch.save(t, p))(
            folder / file, tensors
        )
        index.update(dict.fromkeys(tensors, file))
    path = folder / f"{stem}.{ending}.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize("named", ["folder", "index"])
def test_models_in_several_files(form, named, tmp_path):
    index = sharded(tmp_path, form)
    opened = open_model(tmp_path if named == "folder" else index)
    assert torch.equal(opened.tensors["lm_head.weight"], TABLE + 1)
    assert opened.file_of("lm_head").name.startswith(index.name.split(".")[0] + "-00002")
    assert set(opened.tensors) == {NAME, "lm_head.weight", "norm.weight"}


@pytest.mark.parametrize(
    "iterator, epoch",
    [
        ({"epoch": 3, "iterations_in_epoch": 0}, 2),  # saved at the end of the second
        ({"epoch": 3, "iterations_in_epoch": 7}, 3),
        ({"epoch": 1, "iterations_in_epoch": 0}, 1),
        ({"epoch": 3}, 3),
        ({}, None),
    ],
)
def test_the_epoch_of_a_checkpoint_is_the_last_that_was_trained(iterator, epoch, tmp_path):
    state = {"args": None, "cfg": None, "model": {NAME: TABLE}}
    torch.save({**state, "extra_state": {"train_iterator": iterator}}, tmp_path / "a.pt")
    assert open_model(tmp_path / "a.pt").epoch == epoch


def test_settings_in_containers_of_omegaconf_are_read(tmp_path):
    omegaconf = pytest.importorskip("omegaconf")
    save_dictionary(tmp_path / "dict.txt", 26)
    nodes = {"model": {"_name": "transformer_sc"}, "task": {"data": str(tmp_path)}}
    nodes = {name: omegaconf.OmegaConf.create(node) for name, node in nodes.items()}
    opened = open_model(save(tmp_path / "a.pt", entries(TABLE), **nodes))
    words, remark = opened.find_words("decoder.embed_tokens", 30)
    assert opened.arch == "transformer_sc" and words.symbols[4] == "w0"
    assert remark == "found in the folder of the training data"


def test_what_stands_beside_a_model_is_read(tmp_path):
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    torch.save({NAME: TABLE}, folder / "pytorch_model.bin")
    settings = {"architectures": ["GPT2LMHeadModel"], "pad_token_id": 2, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "trainer_state.json").write_text('{"epoch": 1.5, "global_step": 500}')
    (folder / "vocab.json").write_text(json.dumps({f"w{row}": row for row in range(28)}))
    opened = open_model(folder)
    assert (opened.arch, opened.epoch, opened.updates) == ("GPT2LMHeadModel", 1, 500)
    assert opened.uncounted == [2]
    words, remark = opened.find_words("wte", 30)
    assert words.symbols[27] == "w27" and words.uncounted_rows() == [28, 29]
    (folder / "trainer_state.json").write_text('{"epoch": NaN}')
    assert open_model(folder).epoch is None
    assert remark == "found beside the model"
    assert open_model(folder / "pytorch_model.bin").arch == "GPT2LMHeadModel"
    assert saved_epochs(tmp_path) == [folder]
    # A symbol that ends sentences as well is a word.
    (folder / "config.json").write_text(json.dumps({**settings, "pad_token_id": 3}))
    assert open_model(folder).uncounted == []


@pytest.mark.parametrize("name", ["params.json", "trainer_state.json"])
@pytest.mark.parametrize("content", ["", "[1, 2]", '{"lr": 1'])
def test_a_file_of_another_program_stops_no_model(name, content, tmp_path):
    """It was refused with the advice to copy it again."""
    torch.save({NAME: TABLE}, tmp_path / "pytorch_model.bin")
    (tmp_path / name).write_text(content)
    assert f"{name} beside it was left out" in " ".join(analyze(tmp_path).to_text().split())
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match="config.json"):
        open_model(tmp_path)


def test_a_vocabulary_that_does_not_fit_is_passed_over_with_a_reason(tmp_path):
    torch.save({NAME: TABLE}, tmp_path / "pytorch_model.bin")
    (tmp_path / "vocab.json").write_text(json.dumps({f"w{row}": row for row in range(46)}))
    words, remark = open_model(tmp_path).find_words("wte", 30)
    assert words is None and "vocab.json" in remark and "46 words" in remark
    (tmp_path / "vocab.json").write_text(json.dumps({f"w{row}": row for row in range(31)}))
    words, remark = open_model(tmp_path).find_words("wte", 30)
    assert words.symbols == [f"w{row}" for row in range(30)]
    assert remark == "found beside the model; words without a row: 1"


@pytest.mark.parametrize("name", ["vocab.txt", "vocab.json"])
def test_a_vocabulary_that_may_not_be_read_is_passed_over_with_a_reason(name, tmp_path):
    torch.save({NAME: TABLE}, tmp_path / "pytorch_model.bin")
    (tmp_path / name).touch()
    opened = open_model(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", Mock(side_effect=PermissionError("no right to read it")))
        words, remark = opened.find_words("wte", 30)
    assert words is None and f"{name} could not be used" in remark and "no right" in remark


def test_settings_that_may_not_be_read(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", Mock(side_effect=PermissionError("no right to read it")))
        with pytest.raises(DataError, match="no right to read it.*permissions"):
            read_json(tmp_path / "config.json", "settings")


PADDING = [
    ({"pad_token_id": 0}, [0]),
    ({"pad_token_id": 7, "eos_token_id": 7}, []),
    ({"pad_token_id": 7, "eos_token_id": [5, 7]}, []),
    ({"pad_token_id": 7, "eos_token_id": [5, 6], "bos_token_id": None}, [7]),
    ({"text_config": {"pad_token_id": 3, "eos_token_id": 4}}, [3]),
    ({"text_config": {"pad_token_id": 3}, "eos_token_id": 3}, []),
    ({"pad_token_id": 99}, []),
    ({}, []),
]


@pytest.mark.parametrize("settings, padding", PADDING)
@pytest.mark.parametrize("given", [True, False])
def test_padding_by_the_settings_is_not_measured(given, settings, padding, tmp_path):
    """Also where a tokenizer gives the padding symbol another name than most."""
    torch.save({"lm_head.weight": TABLE}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    file = tmp_path / ("words.json" if given else "tokenizer.json")
    tokens = {f"<|reserved_{row}|>": row for row in range(30)}
    file.write_text(json.dumps({"model": {"vocab": tokens}}))
    report = analyze(tmp_path, dictionary=file if given else None)
    alone = analyze(TABLE[[row for row in range(30) if row not in padding]])
    assert report.to_dict()["checkpoints"][0]["table"]["words"] == 30 - len(padding)
    assert report.scalars()["mean_cosine"] == pytest.approx(alone.scalars()["mean_cosine"])


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(CheckpointError, match="a folder without model.safetensors"):
        open_model(tmp_path)


def test_a_file_that_was_not_fetched(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_model(tmp_path)


OF_OTHER_FORMATS = [
    (struct.pack("<ii", 793712314, 12), "fastText.*.vec file"),
    (b"GGUF" + struct.pack("<IQ", 3, 123), "GGUF.*converted"),
    (b"\x89HDF\r\n\x1a\n", "HDF5.*safetensors"),
    (gzip.compress(b"2 2\na 1 2\nb 3 4\n"), "unpack it"),
    (lzma.compress(b"2 2\na 1 2\nb 3 4\n"), "unpack it"),
]


@pytest.mark.parametrize("start, remedy", OF_OTHER_FORMATS)
def test_what_to_do_with_files_of_other_formats(start, remedy, tmp_path):
    """A .bin of fastText was refused with the words that fastText is known."""
    (tmp_path / "file").write_bytes(start + bytes(range(256)))
    with pytest.raises(CheckpointError, match=remedy) as refused:
        open_model(tmp_path / "file")
    assert "Known are" not in refused.value.remedy


@pytest.mark.parametrize("header", [b"", b"30 4\n"])
def test_blank_lines_in_text(header, tmp_path):
    path = tmp_path / "file"
    vectors(path, header, [*text_lines(), b"\n", b" \n"])
    assert torch.equal(open_model(path).tensors["vectors"], TABLE)
    lines = text_lines()
    vectors(path, header, [*lines[:5], b"\n", *lines[5:]])
    with pytest.raises(DataError, match=f"in line {7 if header else 6}"):
        open_model(path)


@pytest.mark.parametrize("header", [b"", b"30 4\n"])
def test_the_mark_that_windows_puts_in_front_of_a_text_is_no_part_of_it(header, tmp_path):
    vectors(tmp_path / "file", b"\xef\xbb\xbf" + header, text_lines())
    opened = open_model(tmp_path / "file")
    assert torch.equal(opened.tensors["vectors"], TABLE)
    assert opened.find_words("any", 30)[0].symbols == WORDS


def test_a_brace_after_eight_bytes_of_text_is_a_word(tmp_path):
    lines = [b"{ 1 2\n", *(b"w%d 3 4\n" % row for row in range(1, 20000))]
    vectors(tmp_path / "file", b"20000 2\n", lines)
    assert open_model(tmp_path / "file").find_words("any", 20000)[0].symbols[0] == "{"


@pytest.mark.parametrize("header", [b"", b"30 4\n"])
@pytest.mark.parametrize("word", [b"\xe3\x80\x80", b"\xc2\xa0", b" ", b"", b"caf\xe9", b"\xb5\xc4"])
@pytest.mark.parametrize("row", [0, 7])
def test_words_that_are_blank_or_of_another_encoding(row, word, header, tmp_path):
    path, lines = tmp_path / "file", text_lines()
    lines[row] = word + lines[row][len(WORDS[row]) :]
    vectors(path, header, lines)
    assert torch.equal(open_model(path).tensors["vectors"], TABLE)


BLANKS = [b"\x0c", b"\x0b", b"\r", b"\x1c", b"\x85", b"\xc2\xa0", b"\xe3\x80\x80", b"\xe2\x80\xa8"]


@pytest.mark.parametrize("header", [b"", b"4 4\n"])
@pytest.mark.parametrize("end", [b"\n", b" \n", b"\r\n"])
@pytest.mark.parametrize("blank", BLANKS)
def test_only_spaces_tabs_and_line_feeds_separate(blank, end, header, tmp_path):
    """word2vec, gensim and GloVe keep other blanks in their words."""
    words = [b"a", b"a" + blank, blank + b"a", b"b" + blank + b"c"]
    numbers = [" ".join(map(repr, row)).encode() for row in TABLE[:4].tolist()]
    lines = [word + sep + row + end for word, row, sep in zip(words, numbers, (b" ", b"\t") * 2)]
    vectors(tmp_path / "file", header, lines)
    opened = open_model(tmp_path / "file")
    found = opened.find_words("any", 4)[0].symbols
    assert found == [word.decode("utf-8", "replace") for word in words]
    assert torch.equal(opened.tensors["vectors"], TABLE[:4])


@pytest.mark.parametrize("declared", [2, 3, 5, 9])
def test_a_first_line_that_declares_other_vectors_than_follow(declared, tmp_path):
    vectors(tmp_path / "file", b"30 %d\n" % declared, text_lines())
    with pytest.raises(DataError, match=f"{declared} numbers in each line.*(more|found 4)"):
        open_model(tmp_path / "file")


def test_words_that_end_in_a_number(tmp_path):
    lines = text_lines()
    lines[0] = b"phone 1" + lines[0][2:]
    vectors(tmp_path / "file", b"30 4\n", lines)
    opened = open_model(tmp_path / "file")
    assert opened.find_words("any", 30)[0].symbols[:2] == ["phone 1", "w1"]
    assert torch.equal(opened.tensors["vectors"], TABLE)


def test_a_binary_file_with_more_than_it_declares_is_refused(tmp_path):
    vectors(tmp_path / "file", b"29 4\n", binary_lines())
    with pytest.raises(DataError, match="bytes more"):
        open_model(tmp_path / "file")


def test_vectors_without_a_first_line_take_the_memory_of_their_table(tmp_path, monkeypatch):
    """Rows were guessed by the least that a number takes, and the table was 4.5 times as large."""
    row = b" ".join([b"w", *[b"0.123456"] * 50])
    (tmp_path / "glove.txt").write_bytes(b"\n".join([row] * 300))
    empty = Mock(wraps=np.empty)
    monkeypatch.setattr(np, "empty", empty)
    assert open_model(tmp_path / "glove.txt").tensors["vectors"].shape == (300, 50)
    assert empty.call_args[0] == ((300, 50),)


NO_MEMORY = {
    "vectors": (MemoryError("Unable to allocate 21.8 MiB"), np, "empty"),
    "npz": (MemoryError(), np.lib.format, "read_array"),
    "npy": (OSError(12, "Cannot allocate memory"), np, "load"),
    "torch": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch, "load"),
}


@pytest.mark.parametrize("form", NO_MEMORY)
def test_too_little_memory_is_no_damage(form, tmp_path, monkeypatch):
    """It ended in a traceback, or the file was said to be damaged."""
    path = tmp_path / "file"
    if form == "vectors":
        vectors(path, b"", text_lines())
    elif form == "torch":
        torch.save({NAME: TABLE}, path)
    else:
        with open(path, "wb") as file:
            (np.save if form == "npy" else np.savez)(file, TABLE.numpy())
    error, module, name = NO_MEMORY[form]
    monkeypatch.setattr(module, name, Mock(side_effect=error))
    size = path.stat().st_size
    with pytest.raises(CheckpointError, match=f"memory to read .*file.*{size:,} bytes.*machine"):
        open_model(path)


@pytest.mark.parametrize("form", ["npy", "safetensors", "older state dict"])
def test_numbers_that_are_the_end_of_an_archive_by_chance(form, tmp_path):
    """They ended in a traceback of zipfile."""
    table = TABLE.clone()
    end = b"PK\5\6" + b"\1\2\3\x3f" * 7
    table[-2:] = torch.from_numpy(np.frombuffer(end, "<f4").reshape(2, 4).copy())
    path = tmp_path / "file.npy"
    if form == "npy":
        np.save(path, table.numpy())
    elif form == "safetensors":
        safetensors(path, {NAME: table})
    else:
        torch.save({NAME: table}, path, _use_new_zipfile_serialization=False)
    assert analyze(path).scalars() == pytest.approx(analyze(table).scalars())


def test_a_loss_beside_the_state_dict_does_not_hide_it(tmp_path):
    saved = {"epoch": 1, "loss": torch.tensor(0.4), "model_state_dict": {NAME: TABLE}}
    torch.save(saved, tmp_path / "file")
    assert set(open_model(tmp_path / "file").tensors) == {NAME}


@pytest.mark.parametrize("form", ["%.18e", "% .6f", "%g", "%.0f"])
@pytest.mark.parametrize("delimiter", [" ", "\t"])
def test_a_text_without_words_is_refused(form, delimiter, tmp_path):
    """The first column would be taken for words, and left out of the vectors."""
    table = np.random.default_rng(0).normal(size=(40, 4)) * 3
    table[0, 0] = -1.0
    np.savetxt(tmp_path / "table.txt", table, fmt=form, delimiter=delimiter)
    with pytest.raises(DataError, match="a word in front of each vector.*numbers alone"):
        open_model(tmp_path / "table.txt")


@pytest.mark.parametrize("first", [0, 1])
def test_a_line_that_numbers_the_columns_is_no_vector(first, tmp_path):
    """As pandas writes it, where the table would have a row that dwarfs the others."""
    path = tmp_path / "file"
    columns = b" ".join(b"%d" % (first + column) for column in range(4))
    vectors(path, b" " + columns + b"\n", text_lines())
    assert torch.equal(open_model(path).tensors["vectors"], TABLE)
    vectors(path, b" " + columns + b"\n", [b"a 1 2 3\n"])
    with pytest.raises(DataError, match="in line 2"):
        open_model(path)
    vectors(path, b"", [b"a 0 1\n", b"b 3 4\n"])
    assert open_model(path).tensors["vectors"].shape == (2, 2)


def test_whole_numbers_are_names_of_nodes(tmp_path):
    (tmp_path / "nodes.txt").write_text("".join(f"{row} 0.5 {row}.25\n" for row in range(9)))
    assert open_model(tmp_path / "nodes.txt").tensors["vectors"].shape == (9, 2)


@pytest.mark.parametrize("kind", [str, bytes])
def test_words_that_are_stored_beside_arrays(kind, tmp_path):
    """They were left out, and the table measured without words."""
    words = [word if kind is str else word.encode() for word in WORDS]
    np.savez(tmp_path / "file.npz", vectors=TABLE.numpy(), words=np.array(words))
    opened = open_model(tmp_path / "file.npz")
    assert list(opened.tensors) == ["vectors"]
    found, remark = opened.find_words("vectors", 30)
    assert found.symbols == WORDS and remark == "stored with the vectors"
    assert opened.find_words("vectors", 29)[0] is None


@pytest.mark.parametrize("form", ["tuple", "mapping"])
def test_words_that_are_stored_beside_vectors(form, tmp_path):
    """torchtext keeps its vectors so."""
    weight = TABLE.clone()
    weight[7] = 0
    kept = {"itos": WORDS, "stoi": dict(zip(WORDS, range(30))), "vectors": weight, "dim": 4}
    torch.save(tuple(kept.values()) if form == "tuple" else kept, tmp_path / "cache.pt")
    report = analyze(tmp_path / "cache.pt", words=["w3"]).to_dict()["checkpoints"][0]
    assert [one["word"] for one in report["untrained"]] == ["w7"]
    assert report["table"]["words"] == 30 and "stored with" in report["dictionary"]["remark"]
    kept["itos"] = WORDS[:-1]
    torch.save(kept, tmp_path / "other.pt")
    report = analyze(tmp_path / "other.pt").to_dict()["checkpoints"][0]
    assert report["untrained"][0]["word"] is None
