"""``spectral-fairseq next-words``: against the models run word by word."""

import copy
import dataclasses
import json

import pytest
import torch

from spectral_fairseq.commands import models as loading
from spectral_fairseq.commands.main import main
from spectral_fairseq.commands.models import load_language_model
from spectral_fairseq.commands.predicted_words import compare_next_words, predict_next
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.carry import Carry
from tests.language_models import ADAPTIVE, block_checkpoint, remade, stateful_checkpoint

SENTENCES = ["w3 w1 w4", "w1 never-seen </s> w5 w9 w2"]


@pytest.fixture(scope="module")
def checkpoints(train, tiny_lm_data, tmp_path_factory):
    block = block_checkpoint(train)
    other = tmp_path_factory.mktemp("remade") / "other.pt"
    return [str(block), str(remade(stateful_checkpoint(train), other, tiny_lm_data))]


@pytest.fixture
def ask(checkpoints, tiny_lm_data, tmp_path, capsys):
    (tmp_path / "sentences.txt").write_text("\n".join(SENTENCES) + "\n\n", "utf-8")

    def run(*more, paths=checkpoints, status=0):
        argv = ["next-words", *paths, "--data", str(tiny_lm_data)]
        argv += ["--sentences", str(tmp_path / "sentences.txt"), *more]
        assert main(argv) == status
        return capsys.readouterr()

    return run


@torch.no_grad()
def probabilities(path, data, words):
    """p of the next word, from a model that reads one word after the other."""
    model = load_language_model(path, data, {})
    tokens = [model.start, *(model.dictionary.index(word) for word in words)]
    if model.stateful:
        carry = Carry()
        for token in tokens:
            output = model.model(
                torch.tensor([[token]]), src_lengths=torch.tensor([1]), carry=carry
            )
    else:
        output = model.model(torch.tensor([tokens]))
    last = model.model.get_normalized_probs(output, log_probs=False, sample={"target": None})
    return last[0, -1], model.dictionary


def test_next_words_are_those_of_each_model(ask, checkpoints, tiny_lm_data):
    shown = ask("--format", "json", "--top", "3")
    places = json.loads(shown.out)["places"]
    assert "never-seen" in shown.err and "w1" not in shown.err
    assert [place["context"] for place in places] == SENTENCES
    for place in places:
        assert place["reference"] is None
        for path, one in zip(checkpoints, place["models"]):
            p, dictionary = probabilities(path, tiny_lm_data, place["context"].split())
            p[dictionary.pad()] = 0
            best = p.topk(3)
            assert [each["word"] for each in one["next"]] == [dictionary[i] for i in best.indices]
            found = torch.tensor([each["probability"] for each in one["next"]])
            torch.testing.assert_close(found, best.values, rtol=1e-4, atol=1e-6)


def test_largest_gaps_are_positions_inside_the_sentences(ask, checkpoints, tiny_lm_data):
    places = json.loads(ask("--format", "json", "--largest-gaps", "4").out)["places"]
    expected = []
    for sentence in map(str.split, SENTENCES):
        for position, word in enumerate(sentence):
            both = []
            for path in checkpoints:
                p, dictionary = probabilities(path, tiny_lm_data, sentence[:position])
                both.append(float(p[dictionary.index(word)].log()))
            expected.append((both[0] - both[1], " ".join(sentence[:position]), word))
    ahead = sorted((each for each in expected if each[0] > 0), reverse=True)[:4]
    assert ahead, "nothing is tested if the first model is ahead nowhere"
    found = [(place["context"], place["reference"]) for place in places]
    assert found == [each[1:] for each in ahead]


def test_text_has_a_line_for_each_model(ask):
    text = ask("--labels", "block,stateful").out
    first = text.split("\n\n")[0].splitlines()
    assert first[0] == "1  w3 w1 w4 __?__"
    assert [line.split()[0] for line in first[1:]] == ["block", "stateful"]
    assert len(first[1].split()) == 1 + 2 * 5
    assert "next word: " in ask("--largest-gaps", "1").out


def test_what_cannot_be_compared_is_refused(ask, checkpoints, tmp_path):
    assert "--largest-gaps" in ask("--largest-gaps", "1", paths=checkpoints[:1], status=2).err
    assert "--top" in ask("--top", "0", status=2).err
    assert "none.txt" in ask("--sentences", str(tmp_path / "none.txt"), status=2).err
    assert "a device" in ask("--sentences", "/dev/zero", status=2).err
    (tmp_path / "long.txt").write_text("w1 " * 2000, "utf-8")
    assert "words in a sentence" in ask("--sentences", str(tmp_path / "long.txt"), status=2).err


def test_models_of_another_dictionary_are_refused(ask, checkpoints, tiny_lm_data):
    models = [load_language_model(path, tiny_lm_data, {}) for path in checkpoints]
    other = copy.deepcopy(models[1].dictionary)
    other.symbols[-2:] = reversed(other.symbols[-2:])
    pairs = [("one", models[0]), ("two", dataclasses.replace(models[1], dictionary=other))]
    with pytest.raises(ConfigurationError, match="another one with two"):
        compare_next_words(pairs, [["w1"]])


def test_a_dictionary_that_may_be_the_wrong_one_is_warned_of(ask, monkeypatch):
    load = loading.load_language_model

    def with_remark(*arguments, **options):
        return dataclasses.replace(load(*arguments, **options), remark="it differs")

    monkeypatch.setattr(loading, "load_language_model", with_remark)
    assert ask().err.count("warning: it differs") == 1


def test_an_adaptive_softmax_of_fairseq_gives_every_word_its_probability(
    train, tiny_lm_data, tmp_path
):
    path = remade(block_checkpoint(train), tmp_path / "a.pt", tiny_lm_data, **ADAPTIVE)
    model = load_language_model(path, tiny_lm_data, {})
    size = len(model.dictionary)
    found = predict_next(model, ["w1", "w3"], size)
    model_sum = found.probabilities.sum(1)
    assert (model_sum <= 1 + 1e-5).all() and (model_sum > 0.8).all()  # without that of <pad>
    assert (found.reference < 1).all()


def test_text_from_files_moves_no_cursor(ask, tmp_path):
    (tmp_path / "sentences.txt").write_text("w3 \x1b[31mred\u2028w1\n", "utf-8")
    shown = ask()
    assert "\x1b" not in shown.out + shown.err and "\\x1b" in shown.err
    assert shown.out.startswith("1  w3") and "\n2  " not in shown.out
