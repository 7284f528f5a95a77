"""Rank and divergence of a trained model's predictions, against the whole matrix at once."""

import itertools
import shutil

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import FairseqMultiModel

from spectral_fairseq.commands import predictions as model_outputs
from spectral_fairseq.commands.models import load_language_model, load_model_and_task
from spectral_fairseq.commands.predictions import (
    check_memory,
    measure_outputs,
    predict,
    spectrum_bytes,
)
from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError
from spectral_fairseq.plugin.find import output_matrix
from tests.conftest import TINY_LANGUAGE_MODEL
from tests.language_models import ADAPTIVE, block_checkpoint, remade, stateful_checkpoint, tokens_of
from tests.reference import measures as naive_measures

FLAGS = ("transformer", "cross_entropy", "--share-all-embeddings")


@pytest.fixture(scope="module")
def path(train):
    return train(*FLAGS) / "checkpoint_last.pt"


@torch.no_grad()
def whole_matrix(path, data, subset):
    """Log-probabilities sentence by sentence, without batches and so without padding."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(data)}
    )
    model.eval()
    task.load_dataset(subset)
    dataset = task.dataset(subset)
    rows = []
    for index in range(len(dataset)):
        batch = dataset.collater([dataset[index]])
        output = model(**batch["net_input"])
        rows.append(model.get_normalized_probs(output, log_probs=True)[0])
    return torch.cat(rows)


def test_fillers_beyond_the_cut_of_an_output_dictionary(tiny_lm_data, run_cli, tmp_path):
    """They ended in ``index 40 is out of bounds for dimension 0 with size 20``."""
    text, data = tiny_lm_data / "train.txt", tmp_path / "data"
    run_cli(
        *("fairseq-preprocess", "--only-source", "--trainpref", text, "--validpref", text),
        *("--padding-factor", "64", "--destdir", data),
    )
    run_cli(
        *("fairseq-train", data, "--task", "language_modeling", "--tokens-per-sample", "16"),
        *("--arch", "transformer_lm", *TINY_LANGUAGE_MODEL, "--output-dictionary-size", "20"),
        *("--optimizer", "adam", "--max-tokens", "96", "--max-update", "1", "--num-workers", "0"),
        *("--save-dir", tmp_path / "model", "--cpu"),
    )
    path = tmp_path / "model" / "checkpoint_last.pt"
    _, details = measure_outputs(path, data, tokens=50)
    assert details["words"] == 20
    with pytest.raises(UnsupportedError, match="fairseq-eval-lm.* --output-dictionary-size 20"):
        load_language_model(path, data, {})


def test_an_adaptive_softmax_of_fairseq(train, tiny_lm_data, tmp_path):
    """Given the targets, it normalises none but their clusters: the KL was 100 times too large."""
    made = remade(block_checkpoint(train), tmp_path / "a.pt", tiny_lm_data, **ADAPTIVE)
    expected = whole_matrix(made, tiny_lm_data, "valid")
    measures, details = measure_outputs(made, tiny_lm_data, tokens=10_000)
    assert details["tokens"] == len(expected)
    assert measures["expected_pairwise_kl"] == pytest.approx(
        naive_measures.expected_pairwise_kl(expected), rel=1e-4
    )
    sigma = torch.linalg.svdvals(expected.double())
    assert measures["log_probability_rank"] == int((sigma > details["threshold"] * sigma[0]).sum())


def test_against_the_whole_matrix(path, tiny_translation_data, monkeypatch):
    expected = whole_matrix(path, tiny_translation_data, "valid")
    # Small blocks: several a batch.
    monkeypatch.setattr(model_outputs, "_BLOCK_NUMBERS", 7 * expected.size(1))
    seen = []
    measures, details = measure_outputs(
        path, tiny_translation_data, tokens=10_000, progress=seen.append
    )
    assert details["tokens"] == sum(seen) == expected.size(0) and max(seen) == 7
    assert details["words"] == expected.size(1)
    assert measures["expected_pairwise_kl"] == pytest.approx(
        naive_measures.expected_pairwise_kl(expected), rel=1e-4
    )
    sigma = torch.linalg.svdvals(expected.double())
    threshold = 0.5 * (sum(expected.shape) + 1) ** 0.5 * float(sigma[0]) * 2**-23
    assert measures["log_probability_rank"] == int((sigma > threshold).sum())
    assert details["threshold"] == pytest.approx(threshold / float(sigma[0]))
    share = details["cumulative_share"]
    assert share == sorted(share) and share[-1] == 1.0
    assert share[40] == float((sigma <= 1e-3 * sigma[0]).double().mean())


def test_tokens_are_the_first_ones(path, tiny_translation_data):
    _, details = measure_outputs(path, tiny_translation_data, tokens=13)
    assert details["tokens"] == 13 and details["subset"] == "valid"
    # Those of the first sentences of the corpus, not those of the shortest ones.
    expected = whole_matrix(path, tiny_translation_data, "valid")
    for count in (13, len(expected)):
        blocks = predict(path, tiny_translation_data, "valid", count).blocks
        found = torch.cat([block.log_probabilities for block in blocks])
        torch.testing.assert_close(found, expected[:count], rtol=1e-4, atol=1e-4)


def assert_states_belong_to_predictions(path, data, tokens):
    """The last states times W give the log-probabilities, but for a bias and a normaliser."""
    predictions = predict(path, data, "valid", tokens)
    weight = output_matrix(load_model_and_task(path, data, {})[0], predictions.words).detach()
    rows = list(predictions.blocks)
    states = torch.cat([block.states[-1] for block in rows])
    log_probabilities = torch.cat([block.log_probabilities for block in rows])
    rest = log_probabilities - states @ weight.t()
    bias = rest - rest.mean(1, keepdim=True)
    torch.testing.assert_close(bias, bias[:1].expand_as(bias), rtol=0, atol=1e-4)
    return rows


def test_hidden_states_by_layer(path, tiny_translation_data):
    rows = assert_states_belong_to_predictions(path, tiny_translation_data, 100)
    task = load_model_and_task(path, tiny_translation_data, {})[1]
    task.load_dataset("valid")
    lengths = task.dataset("valid").tgt_sizes.tolist()  # in the order of the corpus
    whole = [end for end in itertools.accumulate(lengths) if end <= 100]
    lengths = [*lengths[: len(whole)], 100 - whole[-1]] if whole[-1] < sum(lengths) else lengths
    lengths = [length for length in lengths if length]
    # One decoder layer, after which nothing is normalised: the embeddings and the layer.
    states = [torch.cat([block.states[layer] for block in rows]) for layer in range(2)]
    measures, details = measure_outputs(path, tiny_translation_data, tokens=100)
    assert len(details["layers"]) == len(rows[0].states) == 2
    for seen, layer in zip(states, details["layers"]):
        assert layer["mean_cosine"] == pytest.approx(naive_measures.mean_cosine(seen), abs=1e-5)
        assert layer["isoscore"] == pytest.approx(naive_measures.isoscore(seen), abs=1e-5)
        several = [part for part in seen.split(lengths) if len(part) > 1]
        within = naive_measures.sequence_cosine(several)
        assert layer["sequence_cosine"] == pytest.approx(within, abs=1e-5)
    assert measures["hidden_mean_cosine"] == details["layers"][1]["mean_cosine"]


def test_memory_is_asked_for_beforehand():
    assert spectrum_bytes(80_000, 10_000) < model_outputs.MEMORY_LIMIT
    check_memory(80_000, 10_000)
    with pytest.raises(ConfigurationError, match="--tokens") as caught:
        check_memory(50_000, 100_000)
    suggested = int(str(caught.value).split("--tokens ")[1].rstrip("."))
    check_memory(suggested, 100_000)
    assert spectrum_bytes(suggested + 200, 100_000) > model_outputs.MEMORY_LIMIT
    with pytest.raises(ConfigurationError, match="--tokens to be a whole number >= 2"):
        check_memory(1, 100)


def test_data_that_do_not_fit(path, tiny_translation_data, tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        measure_outputs(path, tmp_path / "absent")
    with pytest.raises(DataError, match="'dev'"):
        measure_outputs(path, tiny_translation_data, "dev")
    with pytest.raises((UnsupportedError, DataError)):
        measure_outputs(path, tmp_path)
    separate = shutil.copytree(tiny_translation_data, tmp_path / "separate")
    with (separate / "dict.en.txt").open("a", encoding="utf-8") as dictionary:
        dictionary.write("another 1\n")
    with pytest.raises(UnsupportedError, match="joined dictionary"):
        measure_outputs(path, separate)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), Exception("of omega")])
def test_an_error_of_any_class_is_explained(error, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(checkpoint_utils, "load_model_ensemble_and_task", refuse)
    with pytest.raises(UnsupportedError, match=type(error).__name__):
        predict("checkpoint.pt", tmp_path, "valid", 10)


class NonAutoregressive(torch.nn.Module):
    """It asks for the targets, as fairseq's do."""

    def forward(self, src_tokens, src_lengths, prev_output_tokens, tgt_tokens):
        raise NotImplementedError


class Multilingual(FairseqMultiModel):
    """A model for each pair of languages."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.models = torch.nn.ModuleDict({"de-en": torch.nn.Linear(2, 2)})


@pytest.mark.parametrize("kind", [NonAutoregressive, Multilingual])
def test_models_whose_predictions_are_not_measured(kind, monkeypatch, tmp_path):
    """Each ended in a traceback."""
    monkeypatch.setattr(model_outputs, "load_model_and_task", lambda *_: (kind(), None))
    with pytest.raises(UnsupportedError, match=f"{kind.__name__}. Leave out --data"):
        predict("checkpoint.pt", tmp_path, "valid", 10)


@torch.no_grad()
def test_a_model_with_a_state_reads_one_stream(train, tiny_lm_data):
    path = stateful_checkpoint(train)
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(tiny_lm_data)}
    )
    tokens = tokens_of(tiny_lm_data, "valid")
    # The state of an LSTM does not depend on where the text is cut: here it is not cut at all.
    inputs = torch.cat([tokens.new_tensor([task.target_dictionary.eos()]), tokens[:-1]])
    model.eval()
    (expected,) = model.get_normalized_probs(model(inputs.unsqueeze(0)), log_probs=True)
    predictions = predict(path, tiny_lm_data, "valid", 10_000)
    assert predictions.tokens == len(tokens) > 3 * task.args.tokens_per_sample
    torch.testing.assert_close(
        torch.cat([rows.log_probabilities for rows in predictions.blocks]),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )
    assert_states_belong_to_predictions(path, tiny_lm_data, 40)
    measures, details = measure_outputs(path, tiny_lm_data, tokens=37)
    assert details["tokens"] == 37
    assert measures["expected_pairwise_kl"] == pytest.approx(
        naive_measures.expected_pairwise_kl(expected[:37]), rel=1e-4
    )
