"""The words of a table and their counts, from every kind of file that names them."""

import base64
import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from spectral_fairseq.analysis import analyze
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.errors import DataError
from spectral_fairseq.formats import words as vocabularies
from spectral_fairseq.formats.counts import read_counts, with_counts
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.formats.words import (
    fitted,
    is_dictionary,
    read_vocabulary,
    vocabulary_file,
)
from tests.checkpoints.made import save_dictionary

TOKENS = ["<pad>", "a", "\u2581b", "c"]
BY_ROW = {token: row for row, token in enumerate(TOKENS)}


def tokenizer(vocab, added=()):
    return json.dumps({"version": "1.0", "model": {"vocab": vocab}, "added_tokens": list(added)})


FILES = {
    "tokenizer.json": tokenizer(BY_ROW),
    "unigram.json": tokenizer([[token, -1.5] for token in TOKENS]),
    "added.json": tokenizer({"a": 1, "\u2581b": 2, "c": 3}, [{"id": 0, "content": "<pad>"}]),
    "no list.json": json.dumps({"model": {"vocab": BY_ROW}, "added_tokens": 5}),
    "vocab.json": json.dumps(BY_ROW),
    "vocab.txt": "\n".join(TOKENS) + "\n",
}


# The same words as other tools write them.
OTHERS = {
    "ctranslate2.json": json.dumps(TOKENS),
    "marian.yml": '"<pad>": 0\na: 1\n"\\u2581b": 2\n\'c\': 3\n',
    "unsorted.yml": 'a: 1\nc: 3\n"<pad>": 0\n\u2581b: 2\n',
    "qwen.tiktoken": "".join(
        f"{base64.b64encode(token.encode()).decode()} {row}\n" for row, token in enumerate(TOKENS)
    ),
    "kaldi.txt": "".join(f"{token} {row}\n" for row, token in enumerate(TOKENS)),
    "tabs.txt": "".join(f"{token}\t{row}\n" for row, token in enumerate(TOKENS)),
    "rows first": "".join(f"{row} {token}\n" for row, token in enumerate(TOKENS)),
    "spiece.vocab": "<pad>\t0\na\t-1.5\n\u2581b\t-2\nc\t-3.25e-1\n",
    "bom/vocab.txt": "\ufeff" + "\r\n".join(TOKENS),
    "bom/vocab.json": "\ufeff" + json.dumps(BY_ROW),
}
FILES.update(OTHERS)


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(FILES[name].encode())
    words = read_vocabulary(tmp_path / name)
    assert not is_dictionary(tmp_path / name)
    assert words.symbols == TOKENS and words.uncounted_rows() == [0] and not words.has_counts


def test_dict_txt_has_counts(tmp_path):
    assert read_vocabulary(save_dictionary(tmp_path / "dict.txt", 5)).has_counts


def test_rwkv_counts_its_rows_from_1(tmp_path):
    lines = ("1 '\\x00' 1", "2 b'\\xff' 1", "3 ' \u0153' 3", '4 "a\'b" 3')
    (tmp_path / "rwkv.txt").write_text("\n".join(lines), "utf-8")
    words = read_vocabulary(tmp_path / "rwkv.txt")
    assert words.symbols == ["row 0", "\x00", "\\xff", " \u0153", "a'b"]
    assert words.uncounted_rows() == [0]


def test_a_file_of_tiktoken_under_the_name_of_a_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").write_text(OTHERS["qwen.tiktoken"])
    assert read_vocabulary(tmp_path / "tokenizer.model").symbols == TOKENS


@pytest.mark.parametrize(
    "name, line", [("tokens", "\u2581t{0} {0}"), ("dict.txt", "t{0} 7"), ("vocab.txt", "t{0}")]
)
def test_a_vocabulary_is_read_and_matched_once(name, line, tmp_path, monkeypatch):
    """A file of 100,000 lines took 12 seconds."""
    lines = "".join(line.format(row) + "\n" for row in range(40))
    (tmp_path / name).write_text(lines, "utf-8")
    reading, matching = Mock(wraps=vocabularies.read_text), Mock(wraps=vocabularies._numbered)
    monkeypatch.setattr(vocabularies, "read_text", reading)
    monkeypatch.setattr(vocabularies, "_numbered", matching)
    found, _ = vocabularies.words_of(Stored("model", {}), "lm_head", 40, tmp_path / name)
    assert len(found.symbols) == 40
    assert reading.call_count == matching.call_count == 1


@pytest.mark.parametrize(
    "content",
    ["0 1\n1 1\n2 1\n", "0 7\n1 9\n2 8\n", "the 9\na 9\nb 2\n", "a: 5\nb: 4\n", "abcd 1\n"],
    ids=["units of speech", "counted units", "words", "colons", "one word"],
)
def test_lines_of_a_dict_txt(content, tmp_path):
    (tmp_path / "dict.txt").write_text(content)
    assert is_dictionary(tmp_path / "dict.txt")
    counts = [int(line.split()[1]) for line in content.splitlines()]
    assert read_vocabulary(tmp_path / "dict.txt").counts[4:] == counts


@pytest.mark.parametrize(
    "name, content",
    [
        ("onmt.vocab", "the\t50\na\t40\n"),
        ("vocab.txt", "the 50\na 40\n"),  # of GloVe
        ("words.csv", "the,0\na,1\n"),
        ("semicolons", "the;0\na;1\n"),
        ("bars", "the|0\na|1\n"),
        ("uniq", "     50 the\n      4 a\n"),
        ("unigrams.arpa", "-1.5\tthe\t-0.3\n-2.5\ta\t-0.3\n"),
        ("merges.txt", "#version: 0.2\n" + "t h\nth e</w>\n" * 10),
        ("codes", "t h 500\nth e</w> 400\n"),  # of fastBPE
        ("counts.json", '{"the": 3, "a": 2, "b": 2}'),
        ("list.json", "[1, 2]"),
        ("gensim.txt", "3\n" + "0\tthe\t9\n1\ta\t5\n" * 10),
    ],
)
def test_columns_are_no_tokens(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=name):
        read_vocabulary(tmp_path / name)


def test_a_token_that_is_there_twice_has_both_rows(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\na\nb\na\n")
    words = read_vocabulary(tmp_path / "vocab.txt")
    assert words.symbols == ["[PAD]", "a", "b", "a"] and words.uncounted_rows() == [0]


def test_words_and_counts_without_the_rows_that_fairseq_adds(tmp_path):
    """word2vec writes such a vocabulary of its vectors; a dict.txt belongs to four more rows."""
    path = save_dictionary(tmp_path / "vocab", 60)
    for rows, third in ((60, "w2"), (64, "</s>")):
        weight = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
        weight[2] = 0
        report = analyze(weight, dictionary=path).to_dict()["checkpoints"][0]
        assert [one["word"] for one in report["untrained"]] == [third]
        assert report["table"]["words"] == rows - (rows == 64)
    path.write_text("</s> 9\n" + "".join(f"w{row} 5\n" for row in range(1, 60)))
    report = analyze(weight[:60], dictionary=path).to_dict()["checkpoints"][0]
    assert [one["word"] for one in report["untrained"]] == ["w2"]


@pytest.mark.parametrize("rows", [50, 61, 63])
def test_a_dict_txt_whose_rows_are_not_known_is_refused(rows, tmp_path):
    """With 61 rows one of fairseq's symbols has a row, and nothing tells which."""
    path = save_dictionary(tmp_path / "dict.txt", 60)
    weight = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(DataError, match=f"{rows} rows of .*60 words in .*after fairseq's 4"):
        analyze(weight, dictionary=path)


def test_rows_that_begin_elsewhere(tmp_path):
    (tmp_path / "tokens").write_text("".join(f"w{row} {row}\n" for row in range(4, 30)))
    words = read_vocabulary(tmp_path / "tokens")
    assert words.symbols[:5] == ["row 0", "row 1", "row 2", "row 3", "w4"]
    assert words.uncounted_rows() == [0, 1, 2, 3] and not words.has_counts


def test_a_number_of_thousands_of_digits_is_no_row(tmp_path):
    (tmp_path / "tokens").write_text(f"a {'9' * 5000}\nb 1\n")
    with pytest.raises(DataError, match="tokens"):
        read_vocabulary(tmp_path / "tokens")


def test_rows_that_are_counted_from_1(tmp_path):
    """As many as the table has: the last one would have no row."""
    path = tmp_path / "tokens"
    path.write_text("".join(f"w{row} {row + 1}\n" for row in range(60)))
    weight = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    report = analyze(weight, dictionary=path).to_dict()["checkpoints"][0]
    assert [one["word"] for one in report["untrained"]] == ["w2"]
    assert report["table"]["words"] == 60 and "from 1" in report["dictionary"]["remark"]


def added_tokens(kind):
    """Files that name five tokens of the rows 60 to 64."""
    tokens = {f"<new{number}>": 60 + number for number in range(5)}
    if kind == "added_tokens.json":
        return json.dumps(tokens)
    decoder = {str(row): {"content": token} for token, row in tokens.items()}
    return json.dumps({"added_tokens_decoder": {**decoder, "0": {"content": "w0"}}})


@pytest.mark.parametrize("kind", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("name", ["vocab.json", "vocab.txt", "tokenizer.model"])
def test_added_tokens_are_words(kind, name, tmp_path):
    tokens = [f"w{row}" for row in range(60)]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / kind).write_text(added_tokens(kind))
    if name == "tokenizer.model":
        sentencepiece = pytest.importorskip("sentencepiece")
        (tmp_path / "text").write_text("\n".join(["abcdefghijklmnopqrstuvwxyz wxyz w0 vwxyz"] * 20))
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"),
            model_prefix=str(tmp_path / "tokenizer"),
            vocab_size=60,
            model_type="bpe",
            unk_piece="w0",
            minloglevel=2,
            hard_vocab_limit=False,
        )
    elif name == "vocab.json":
        (tmp_path / name).write_text(json.dumps({token: row for row, token in enumerate(tokens)}))
    else:
        (tmp_path / name).write_text("\n".join(tokens))
    weight = torch.randn(65, 16, generator=torch.Generator().manual_seed(0))
    weight[62] = 0
    torch.save({"model.embed_tokens.weight": weight}, tmp_path / "pytorch_model.bin")
    report = analyze(tmp_path).to_dict()["checkpoints"][0]
    assert report["table"]["words"] == 65
    assert [one["word"] for one in report["untrained"]] == ["<new2>"]


def test_a_sentencepiece_model(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=16,
        pad_id=3,
        minloglevel=2,
    )
    # XLM-R, mBART and NLLB have their special tokens elsewhere, and a file of this name.
    (tmp_path / "sentencepiece.bpe.model").write_bytes((tmp_path / "spiece.model").read_bytes())
    with pytest.raises(DataError, match="pieces other rows. Give tokenizer.json"):
        read_vocabulary(tmp_path / "sentencepiece.bpe.model")
    words = read_vocabulary(tmp_path / "spiece.model")
    assert words.symbols[:4] == ["<unk>", "<s>", "</s>", "<pad>"] and len(words.symbols) == 16
    assert words.uncounted_rows() == [3]
    (tmp_path / "spiece.model").write_bytes(b"nothing")
    with pytest.raises(DataError, match="a sentencepiece model"):
        read_vocabulary(tmp_path / "spiece.model")


def test_rows_without_a_token_are_no_words(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 3}')
    (tmp_path / "added_tokens.json").write_text('{"new": 4}')
    words = read_vocabulary(tmp_path / "vocab.json")
    assert words.symbols[3:] == ["b", "new"] and words.uncounted_rows() == [1, 2]


def test_the_file_of_a_folder(tmp_path):
    assert vocabulary_file(tmp_path, "decoder") is None
    for name in ("spiece.model", "vocab.json", "tokenizer.json"):
        (tmp_path / name).touch()
        assert vocabulary_file(tmp_path, "decoder").name == name
    (tmp_path / "target_vocab.json").touch()  # Marian with a vocabulary for each side
    assert vocabulary_file(tmp_path, "decoder").name == "target_vocab.json"
    assert vocabulary_file(tmp_path, "encoder.embed").name == "vocab.json"


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "{",
        '{"a": -1}',
        '{"a": "0"}',
        '{"a": true}',
        '{"a": 1152921504606846976}',
        '{"a": 60000000}',
        tokenizer("none"),
        tokenizer({}),
        tokenizer({"a": 0}, [{"content": "b"}]),
        "\xff\xfe",
    ],
)
def test_unusable_files(content, tmp_path):
    (tmp_path / "vocab.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="vocab.json"):
        read_vocabulary(tmp_path / "vocab.json")


def given(path, rows):
    """The words of a table of so many rows, by the file that is given for it."""
    return vocabularies.words_of(Stored("model", {}), "wte", rows, path)[0]


def test_fillers(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text('{"a": 0, "b": 1, "<pad>": 2}')
    larger = given(path, 5)
    assert larger.symbols == ["a", "b", "<pad>", "row 3", "row 4"]
    assert larger.counts == [0] * 5 and larger.uncounted_rows() == [2, 3, 4]
    for rows in (1, 7, 3000):
        with pytest.raises(DataError, match=f"the {rows} rows of wte in model.*3 words"):
            given(path, rows)


@pytest.mark.parametrize("count, rows", [(100_015, 102_400), (200_019, 201_088)])
def test_a_large_table_has_more_fillers(count, rows, tmp_path):
    """The sizes of DeepSeek-V2 and of gpt-oss, and their tokenizers'."""
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({f"t{row}": row for row in range(count)}))
    assert given(path, rows).uncounted_rows() == [*range(count, rows)]
    for other in (rows + rows // 10, rows - rows // 10):
        with pytest.raises(DataError, match=f"the {other} rows"):
            given(path, other)


def test_tokens_without_a_row_are_left_out():
    words = WordList("tokenizer.json", ["<pad>", "a", "b", "c", "<image>"], [0, 4, 3, 2, 0], [0, 4])
    smaller = fitted(words, 4)
    assert smaller.symbols == ["<pad>", "a", "b", "c"] and smaller.counts == [0, 4, 3, 2]
    assert smaller.uncounted_rows() == [0]


COUNT_FILES = {
    "counts.txt": "the 7\nb 3.0\nc\t2\n",
    "counts.json": '{"the": 7, "b": 3, "c": 2}',
    "rows.txt": "7\n3\n2\n",
    "rows.json": "[7, 3, 2]",
}
COUNT_FILES.update({f"marked {name}": f"\ufeff{text}" for name, text in COUNT_FILES.items()})


@pytest.mark.parametrize("name", [*COUNT_FILES, "rows.npy", "rows.npz", "rows of .npz.npy"])
def test_counts(name, tmp_path):
    if "np" in name:
        save = np.savez if "npz" in name else np.save
        with open(tmp_path / name, "wb") as file:
            save(file, np.array([7, 3, 2]))
    else:
        (tmp_path / name).write_text(COUNT_FILES[name], "utf-8")
    words = WordList("vocab.json", ["the", "b", "c", "filler"], [0] * 4, [3])
    assert with_counts(words, tmp_path / name, 4).counts == [7, 3, 2, 0]
    if "rows" in name:
        alone = with_counts(None, tmp_path / name, 3)
        assert alone.counts == [7, 3, 2] and alone.symbols == ["row 0", "row 1", "row 2"]


def test_counts_of_words_that_are_or_end_in_blanks(tmp_path):
    (tmp_path / "counts.txt").write_text("\u3000 7\na\u00a0 3 \n\na b\t2\nc\x0c\t 1\n", "utf-8")
    expected = {"\u3000": 7, "a\u00a0": 3, "a b": 2, "c\x0c": 1}
    assert read_counts(tmp_path / "counts.txt") == expected
    (tmp_path / "counts.txt").write_text(" 7\n3 \n")
    assert read_counts(tmp_path / "counts.txt") == [7, 3]


@pytest.mark.parametrize(
    "content, message",
    [
        ("a b\n", "line 1"),
        ("a 1\n2\n", "line 2"),
        ("other 3\n", "at least one count of a word of"),
        ("1\n2\n", "a count for each of 3 rows"),
        ("a -1\n", "whole numbers"),
        ("a inf\n", "whole numbers"),
        ("a 1_0\n", "line 1"),
        ("a 0.25\n", "Multiply relative frequencies"),
        ("a 99999999999999999999\n", "whole numbers"),
    ],
)
def test_unusable_counts(content, message, tmp_path):
    (tmp_path / "counts.txt").write_text(content)
    words = WordList("vocab.json", ["a", "b", "c"], [0] * 3, [])
    with pytest.raises(DataError, match=message):
        with_counts(words, tmp_path / "counts.txt", 3)


def test_one_array_of_counts_is_needed(tmp_path):
    np.savez(tmp_path / "counts.npz", np.arange(3), np.arange(3))
    with pytest.raises(DataError, match="1 array of counts .* found 2"):
        read_counts(tmp_path / "counts.npz")


def test_counts_by_word_need_words():
    with pytest.raises(DataError, match="without a vocabulary"):
        with_counts(None, {"a": 1}, 3)


def test_counts_leave_rows_without_words_uncounted():
    found = with_counts(None, [0, 5, 3], 3, uncounted=[0])
    assert found.path is None and found.uncounted_rows() == [0]


def test_a_list_of_counts_that_leaves_out_a_row_before_the_last_word_is_refused():
    """Every word after the padding would get its neighbour's count."""
    words = WordList("dict.txt", ["<s>", "<pad>", "a", "b", "filler"], [0] * 5, [1, 4])
    assert with_counts(words, [1, 0, 7, 3], 5).counts == [1, 0, 7, 3, 0]
    with pytest.raises(DataError, match="a count for each of 5 rows"):
        with_counts(words, [1, 7, 3], 5)


def test_no_memory_is_taken_for_the_rows_that_a_file_declares():
    """A file of a hundred bytes may declare any number of rows without numbers."""
    for counts in ([7, 3], {"a": 1}):
        with pytest.raises(DataError, match="counts"):
            with_counts(None, counts, 2**60)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_counts_from_python(kind):
    assert with_counts(None, kind([7, 3, 0]), 3).counts == [7, 3, 0]
