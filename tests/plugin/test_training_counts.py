"""Counts of special symbols in the training data, and the tables that start from them."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from fairseq import models, options, tasks
from fairseq.data import Dictionary, indexed_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from spectral_fairseq.embeddings import WeightNormEmbedding
from spectral_fairseq.errors import DataError
from spectral_fairseq.plugin.counts import training_counts
from spectral_fairseq.plugin.objective import Words
from tests.plugin.conftest import build_model

LINES = {
    "train.de-en.de": [[4, 5, 3, 2], [3, 2]],
    "train.de-en.en": [[4, 4, 2], [5, 2], [2]],
    "train1.de-en.en": [[3, 3, 3, 2]],
    "valid.de-en.en": [[3, 2]] * 9,
}


def _write(folder, name, lines, kind="mmap"):
    prefix = str(folder / name)
    file = indexed_dataset.data_file_path(prefix)
    builder = indexed_dataset.make_builder(file, impl=kind, vocab_size=6)
    for line in lines:
        builder.add_item(torch.tensor(line, dtype=torch.int32))
    builder.finalize(indexed_dataset.index_file_path(prefix))


def _dictionary(**counts):
    dictionary = Dictionary()
    for word, count in (counts or {"a": 40, "b": 9}).items():
        dictionary.add_symbol(word, n=count)
    return dictionary


def _task(data, source, target):
    return SimpleNamespace(
        cfg=SimpleNamespace(data=str(data), source_lang="de", target_lang="en"),
        source_dictionary=source,
        target_dictionary=target,
    )


@pytest.mark.parametrize("kind", ["mmap", "lazy"])
def test_special_symbols_are_counted_in_the_training_text(tmp_path, kind):
    for name, lines in LINES.items():
        _write(tmp_path, name, lines, kind)
    words, other = _dictionary(), _dictionary(c=3, d=2)
    # bos, pad, eos, unk, and then the words, whatever the dictionary says
    assert training_counts(_task(tmp_path, other, words), words) == [0, 0, 4, 3, 2, 1]
    joined = _task(tmp_path, words, _dictionary())
    assert training_counts(joined, words) == [0, 0, 6, 5, 3, 2]


@pytest.mark.parametrize("counted, expected", [
    ({"a": 3, "b": 2}, [0, 0, 6, 5, 3, 2]),  # joined: the words of both languages
    ({"a": 2, "b": 1}, [0, 0, 4, 3, 2, 1]),  # of the target alone, given for both
    ({"a": 30, "b": 20}, [0, 0, 6, 5, 3, 2]),  # of a larger text
    ({"a": 100, "b": 100}, [0, 0, 6, 5, 3, 2]),  # not counted, as sentencepiece's recipe
    ({"a": 1, "b": 1}, [0, 0, 6, 5, 3, 2]),
])  # fmt: skip
def test_equal_dictionaries_are_counted_in_the_languages_of_their_words(
    tmp_path, counted, expected
):
    for name, lines in LINES.items():
        _write(tmp_path, name, lines)
    words, copy = _dictionary(**counted), _dictionary(**counted)
    task = _task(tmp_path, copy, words)
    for one in (words, copy, _dictionary(**counted)):
        assert training_counts(task, one) == expected


def test_symbols_that_a_task_adds_do_not_make_placeholders_counts(tmp_path):
    """Their count is 1, which made the sum of placeholders that of the nearest language."""
    for name, lines in LINES.items():
        _write(tmp_path, name, [line * (40 if ".en" in name else 1) for line in lines])
    words, copy = (_dictionary(a=2, b=2) for _ in range(2))
    for one in (words, copy):
        one.add_symbol("__en__")
    found = training_counts(_task(tmp_path, copy, words), words)
    assert found == [0, 0, 2 + 160, 2 + 120, 1 + 80, 1 + 40, 0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="and no binarised"):
        training_counts(_task(tmp_path / "empty", copy, words), words)


def test_text_on_both_sides_is_counted_once(tmp_path):
    """Autoencoding: both dictionaries are made from the same lines, and neither is joined."""
    for language in ("de", "en"):
        _write(tmp_path, f"train.de-en.{language}", [[4, 4, 5, 2], [4, 3, 2]])
    words = _dictionary(a=3, b=1)
    task = _task(tmp_path, _dictionary(a=3, b=1), words)
    assert training_counts(task, words) == [0, 0, 2, 1, 3, 1]  # not twice as many


@pytest.mark.parametrize("name", ["stateful_language_modeling", "language_modeling", "denoising"])
def test_the_split_that_is_trained_on_is_counted(name, tmp_path):
    """Also by tasks of fairseq that have no setting of their own for its name."""
    _write(tmp_path, "train", [[4, 2]] * 9)
    _write(tmp_path, "mine", [[4, 3, 2]])
    words = _dictionary()
    words.save(str(tmp_path / "dict.txt"))
    argv = f"{tmp_path} --task {name} --arch awd_lstm_wt2 --train-subset mine --batch-size 1"
    parser = options.get_training_parser()
    parsed = options.parse_args_and_arch(parser, argv.split())
    task = tasks.setup_task(convert_namespace_to_omegaconf(parsed).task)
    assert training_counts(task, words) == [0, 0, 1, 1, 1, 0]


def test_every_data_folder_is_counted(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        _write(tmp_path / folder, "train", [[4, 5, 3, 2], []])
    task = SimpleNamespace(args=SimpleNamespace(data=f"{tmp_path}/one:{tmp_path}/two"))
    assert training_counts(task, _dictionary()) == [0, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("langs, expected", [
    (None, [0, 0, 3, 1, 3, 0]),
    ("", [0, 0, 3, 1, 3, 0]),
    ("en", [0, 0, 1, 1, 1, 0]),
])  # fmt: skip
def test_a_folder_for_each_language_is_counted(langs, expected, tmp_path):
    """As multilingual_language_modeling and multilingual_denoising read them."""
    for language, lines in {"de": [[4, 2]] * 2, "en": [[4, 3, 2]]}.items():
        (tmp_path / language).mkdir()
        _write(tmp_path / language, "train", lines)
    task = SimpleNamespace(args=SimpleNamespace(data=str(tmp_path), langs=langs))
    assert training_counts(task, _dictionary(a=100, b=100)) == expected


def test_words_beyond_a_cut_dictionary_are_unknown(tmp_path):
    _write(tmp_path, "train", [[4, 5, 3, 2]])
    task = SimpleNamespace(args=SimpleNamespace(data=str(tmp_path)))
    assert training_counts(task, _dictionary(a=40)) == [0, 0, 1, 2, 1]


def test_without_data_the_mean_of_the_words_is_taken(tmp_path, caplog):
    counts = training_counts(_task(tmp_path, _dictionary(), _dictionary()), _dictionary())
    expected = math.sqrt(41 * 10) - 1
    assert counts == pytest.approx([1, 1, expected, expected, 40, 9], rel=1e-5)
    assert "no binarised training data" in caplog.text


def _language_modeling(data):
    return tasks.get_task("language_modeling").setup_task(
        SimpleNamespace(
            **{
                **dict(task="language_modeling", data=str(data), self_target=False),
                **dict(future_target=False, past_target=False, output_dictionary_size=-1),
            }
        )
    )


@pytest.fixture
def spoken(tiny_lm_data):
    """A task, and how often each symbol occurs in the text that it trains on."""
    lines = (tiny_lm_data / "train.txt").read_text("utf-8").splitlines()
    return _language_modeling(tiny_lm_data), Counter(
        word for line in lines for word in [*line.split(), "</s>"]
    )


def test_a_table_starts_from_the_number_of_lines(spoken):
    task, occurs = spoken
    model = build_model(task, "awd_lstm_wt2", embedding_type="weight-norm")
    (table,) = (m for m in model.modules() if isinstance(m, WeightNormEmbedding))
    for symbol in ("</s>", "w3"):
        expected = 0.5 * math.log1p(occurs[symbol])
        found = float(table.g[task.target_dictionary.index(symbol)].detach())
        assert found == pytest.approx(expected, rel=1e-6)


def test_targets_by_count_know_the_number_of_lines(spoken):
    task, occurs = spoken
    words = Words(task.target_dictionary, task)
    end = task.target_dictionary.eos()
    assert float(words.log_counts[end]) == pytest.approx(math.log1p(occurs["</s>"]), rel=1e-6)


@pytest.mark.parametrize("counts, found", [
    ((1, 1), "2 words, all with the count 1"),
    ((100, 100), "2 words, all with the count 100"),
    ((0, -1), "no count above 0"),  # ranks, as in the vocabulary of sentencepiece's BPE
])  # fmt: skip
def test_a_dictionary_that_was_not_counted_is_refused_without_data(tmp_path, counts, found):
    """All words started at one length."""
    words = _dictionary(**dict(zip("ab", counts)))
    task = _task(tmp_path, words, words)
    with pytest.raises(DataError, match=f"found {found}, and no binarised"):
        Words(words, task).log_counts  # noqa: B018
    with pytest.raises(DataError, match="all with the count"):
        WeightNormEmbedding(2, 4, 1, counts=[100, 100])


def test_a_restored_model_counts_nothing(spoken, monkeypatch, caplog):
    task, _ = spoken
    monkeypatch.setattr(task.args, "data", "nowhere")
    options = OmegaConf.create({"_name": "awd_lstm_wt2", "embedding_type": "weight-norm"})
    models.build_model(options, task, True)
    assert "no binarised" not in caplog.text
    models.build_model(options, task)
    assert "no binarised" in caplog.text
    task.target_dictionary.count = [1] * len(task.target_dictionary)
    models.build_model(options, task, True)


@pytest.mark.parametrize("file, data, warned", [
    ([100] * 36, range(36, 0, -1), False),
    ([100] * 36, range(1, 37), True),  # dict.txt of sentencepiece: no order was visible
    (range(36, 0, -1), range(1, 37), True),
    (range(1, 37), range(36, 0, -1), False),
    ([100] * 36, None, False),
    (range(1, 37), None, True),
])  # fmt: skip
def test_the_order_of_an_adaptive_softmax_is_judged_by_the_training_data(
    tmp_path, caplog, file, data, warned
):
    lines = "".join(f"w{index} {count}\n" for index, count in enumerate(file))
    (tmp_path / "dict.txt").write_text(lines, "utf-8")
    if data is not None:
        _write(tmp_path, "train", [[4 + word] * count for word, count in enumerate(data)])
    task = _language_modeling(tmp_path)
    build_model(task, "transformer_xl_wt103_small", adaptive_softmax_cutoff="10,20")
    assert ("falling counts" in caplog.text) == warned
    assert "</s> and <unk>" not in caplog.text  # which a warning of order has no need of


@pytest.mark.parametrize("pairs", ["de-en,en-de", ["de-en"]])
def test_the_languages_of_all_pairs_are_counted(tmp_path, pairs):
    """Their training data were not found, so </s> and <unk> started from the words' mean."""
    for name, lines in LINES.items():
        _write(tmp_path, name, lines)
    words = _dictionary()
    task = SimpleNamespace(
        cfg=SimpleNamespace(data=str(tmp_path), lang_pairs=pairs, source_lang=None),
        dicts={"de": words, "en": _dictionary()},
    )
    assert training_counts(task, words) == [0, 0, 6, 5, 3, 2]
