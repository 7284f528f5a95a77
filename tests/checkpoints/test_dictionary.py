"""dict.txt read without fairseq, and found where the checkpoint was trained."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from spectral_fairseq.checkpoints.dictionary import find_dictionary, read_dictionary
from spectral_fairseq.errors import DataError
from tests.checkpoints.made import save_dictionary


def test_read_as_fairseq_does(tmp_path):
    from fairseq.data import Dictionary

    file = tmp_path / "dict.txt"
    text = "\ufeffthe 52\n\u2581of 9\n<unk> 7 #fairseq:overwrite\nmadeupword0000 0\n"
    file.write_text(text, "utf-8")
    ours, theirs = read_dictionary(file), Dictionary.load(str(file))
    assert ours.symbols == theirs.symbols
    assert ours.counts[4:] == theirs.count[4:]
    assert ours.uncounted_rows() == [1, 7]
    assert ours.row_of("\u2581of") == 5 and ours.row_of("absent") is None


def test_ranks_of_sentencepiece_are_no_counts(tmp_path):
    from fairseq.data import Dictionary

    file = tmp_path / "dict.txt"
    file.write_text("\u2581t 0\nhe -1\n\u2581a -2\n", "utf-8")
    ours = read_dictionary(file)
    assert ours.counts[4:] == Dictionary.load(str(file)).count[4:] == [0, -1, -2]
    assert not ours.has_counts and ours.uncounted_rows() == [1]


def test_line_separators_of_unicode_are_symbols_as_for_fairseq(tmp_path):
    from fairseq.data import Dictionary

    file = tmp_path / "dict.txt"
    file.write_text("a\u2028b 3\n\u0085 2\n\x1cc 1\n", "utf-8")
    assert read_dictionary(file).symbols == Dictionary.load(str(file)).symbols


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "at least one word in the dictionary"),
        ("\n\n", "at least one word in the dictionary"),
        ("word\n", "line 1"),
        ("a 1\nb x\n", "line 2"),
        ("a 1\na 2\n", "'a' again"),
        ("a \u00b2\n", "line 1"),
        ("a - 1\nb -\n", "line 2"),
        (f"a {2**63}\n", "line 1"),
        (f"a -{2**63}\n", "line 1"),
    ],
)
def test_unusable_files(tmp_path, content, message):
    file = tmp_path / "dict.txt"
    file.write_text(content, "utf-8")
    with pytest.raises(DataError, match=message):
        read_dictionary(file)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_dictionary(tmp_path / "dict.txt")
    (tmp_path / "dict.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_dictionary(tmp_path / "dict.txt")


ENCODER, DECODER = "encoder.embed_tokens", "decoder.embed_tokens"


def found(given, task, table=DECODER, rows=10):
    """The dictionary of a table of a training with these settings, and what is said of it."""
    return find_dictionary(given, task, table, rows, "x.pt")


def write(folder, **sizes):
    """dict.LANGUAGE.txt of so many words, which begin with the language's name."""
    for language, size in sizes.items():
        save_dictionary(folder / f"dict.{language}.txt", size, language)


def languages(folder, source="de", target="en"):
    return {"data": f"{folder}:elsewhere", "source_lang": source, "target_lang": target}


def test_the_side_of_the_table_decides(tmp_path):
    write(tmp_path, de=6, en=6)
    for table, word in ((ENCODER, "de0"), (DECODER, "en0")):
        for given in (None, tmp_path):
            assert found(given, languages(tmp_path), table)[0].symbols[4] == word


def test_languages_that_fairseq_inferred_are_not_in_the_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, de=6, en=6)
    for name in ("train.de-en.de.idx", "valid.de-en.en.bin", "preprocess.log"):
        (tmp_path / name).touch()
    inferred = languages(tmp_path, None, None)
    for table, word in ((ENCODER, "de0"), (DECODER, "en0")):
        assert found(None, inferred, table)[0].symbols[4] == word
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", Mock(side_effect=PermissionError))
        assert found(None, languages(tmp_path))[0].symbols[4] == "en0"
    (tmp_path / "train.de-fr.de.idx").touch()  # which pair was it?
    assert found(None, inferred)[0] is None


def test_only_a_dictionary_of_the_right_size_is_taken(tmp_path):
    write(tmp_path, de=6, en=9)
    task = languages(tmp_path)
    assert found(None, task, ENCODER, 13)[0].symbols[4] == "en0"
    words, remark = found(None, task, ENCODER, 5)
    assert words is None and "none of 5 symbols" in remark
    with pytest.raises(DataError, match="5 rows.*10 words"):
        found(tmp_path / "dict.de.txt", {}, ENCODER, 5)
    with pytest.raises(DataError, match="5 rows"):
        found(tmp_path, task, ENCODER, 5)


def test_none(tmp_path):
    words, remark = find_dictionary(None, {}, "t", 5, "x.pt")
    assert words is None and "none given" in remark
    with pytest.raises(DataError, match="none"):
        find_dictionary(tmp_path, {}, "t", 5, "x.pt")


def test_data_by_a_path_relative_to_where_the_training_started(tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    save_dictionary(tmp_path / "data" / "dict.txt", 3)
    monkeypatch.chdir(tmp_path / "elsewhere")
    task = {"data": "data"}
    path = tmp_path / "run" / "checkpoints" / "checkpoint_best.pt"
    words, _ = find_dictionary(None, task, "t", 7, path)
    assert words.path == tmp_path / "data" / "dict.txt"
    assert find_dictionary(None, task, "t", 8, path)[0] is None
    task["data"] = "absent"
    words, remark = find_dictionary(None, task, "t", 7, path)
    assert words is None and "'absent'" in remark


PAIRS = {"_name": "multilingual_translation", "lang_pairs": ["de-en", "fr-en"]}
SIMPLE = {"_name": "translation_multi_simple_epoch", "lang_pairs": "de-en,fr-en"}
DENOISING = {"_name": "multilingual_denoising", "add_lang_token": True}


@pytest.mark.parametrize("task, added", [
    (PAIRS, []),
    ({**PAIRS, "decoder_langtok": True}, ["__de__", "__en__", "__fr__"]),
    ({**PAIRS, "encoder_langtok": "src"}, ["__de__", "__en__", "__fr__"]),
    (SIMPLE, ["__de__", "__en__", "__fr__"]),
    ({**SIMPLE, "langs": ["fr", "en", "de"]}, ["__fr__", "__en__", "__de__"]),
    ({**SIMPLE, "lang_dict": "elsewhere/langs"}, ["__en__", "__fr__", "__de__"]),
    (
        {**SIMPLE, "langtoks_specs": ["main", "mono_dae"], "langs": "de,en"},
        ["__de__", "__en__", "__de_dae__", "__en_dae__"],
    ),
    ({**SIMPLE, "lang_tok_style": "mbart", "langs": "de,en"}, ["[de]", "[en]", "<mask>"]),
    ({"_name": "translation_from_pretrained_bart", "langs": "x,y"}, ["[x]", "[y]", "<mask>"]),
    ({**DENOISING, "langs": "b,a"}, ["[b]", "[a]", "<mask>"]),
    (DENOISING, ["[data_a]", "[data_b]", "<mask>"]),
    ({"_name": "denoising"}, ["<mask>"]),
    ({"_name": "masked_lm"}, ["<mask>"]),
    ({"_name": "multilingual_language_modeling", "add_bos_token": True}, ["<data_a>", "<data_b>"]),
    ({"_name": "translation", "source_lang": "de", "target_lang": "en"}, []),
])  # fmt: skip
def test_symbols_that_the_task_appends(tmp_path, task, added):
    write(tmp_path, de=6, en=6, fr=6)
    save_dictionary(tmp_path / "dict.txt", 6)
    (tmp_path / "langs").write_text("en\nfr\n\nde\n")
    for name in ("data_a", "data_b"):
        (tmp_path / name).mkdir()
    task, rows = {**task, "data": str(tmp_path)}, 10 + len(added)
    for given in (tmp_path, tmp_path / "dict.en.txt", None):
        words, _ = found(given, task, rows=rows)
        assert words.symbols[10:] == added and len(words.counts) == rows
    if added:
        message = f"10 words in .*, {len(added)} appended by its task"
        with pytest.raises(DataError, match=message):
            found(tmp_path, task, rows=rows + 1)


def test_the_pair_of_a_table_names_its_language(tmp_path):
    write(tmp_path, de=6, en=6, fr=6)
    for side, language in (("encoder", "fr"), ("decoder", "en")):
        table = f"models.fr-en.{side}.embed_tokens.weight"
        words, _ = found(tmp_path, {**PAIRS, "data": str(tmp_path)}, table)
        assert words.symbols[4] == f"{language}0"


def test_dictionaries_that_no_setting_names_are_listed(tmp_path):
    write(tmp_path, de=6, en=6)
    with pytest.raises(DataError, match="found dict.de.txt, dict.en.txt. Name the file itself"):
        found(tmp_path, {})
