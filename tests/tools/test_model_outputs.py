"""Rank and divergence of a trained model's predictions, against the whole matrix at once."""

import shutil

import pytest
import torch
from fairseq import checkpoint_utils

from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError
from spectral_fairseq.tools import model_outputs
from spectral_fairseq.tools.model_outputs import (
    check_memory,
    measure_outputs,
    predict,
    spectrum_bytes,
)
from tests.language_models import stateful_checkpoint, tokens_of
from tests.reference.divergence import expected_pairwise_kl

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
        expected_pairwise_kl(expected), rel=1e-4
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


def test_memory_is_asked_for_beforehand():
    assert spectrum_bytes(80_000, 10_000) < model_outputs.MEMORY_LIMIT
    check_memory(80_000, 10_000)
    with pytest.raises(ConfigurationError, match="--tokens") as caught:
        check_memory(50_000, 100_000)
    suggested = int(str(caught.value).split("--tokens ")[1].rstrip("."))
    check_memory(suggested, 100_000)
    assert spectrum_bytes(suggested + 200, 100_000) > model_outputs.MEMORY_LIMIT
    with pytest.raises(ConfigurationError, match="at least 2"):
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
    torch.testing.assert_close(torch.cat(list(predictions.blocks)), expected, rtol=1e-4, atol=1e-5)
    measures, details = measure_outputs(path, tiny_lm_data, tokens=37)
    assert details["tokens"] == 37
    assert measures["expected_pairwise_kl"] == pytest.approx(
        expected_pairwise_kl(expected[:37]), rel=1e-4
    )
