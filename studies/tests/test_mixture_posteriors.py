"""The weights of a mixture's experts: their shares sum to one, and impossible sizes are refused."""

import json
import sys

import pytest
import torch

from studies import mixture_posteriors


@pytest.fixture
def figures(monkeypatch, capsys):
    """Run the script and return the JSON of its last line."""

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["mixture_posteriors", *map(str, argv)])
        mixture_posteriors.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_no_tokens_are_refused_at_once(figures, capsys):
    with pytest.raises(SystemExit):
        figures("model.pt", "data", "--tokens", 0)
    assert "argument --tokens: expected a number of at least 1; found 0" in capsys.readouterr().err


def test_posteriors(figures, train, tiny_translation_data):
    checkpoint = train("transformer_mos", "mle_cosreg", "--mixture-components", "3")
    found = figures(checkpoint / "checkpoint_last.pt", tiny_translation_data, "--tokens", 20)
    assert found["components"] == 3 and found["tokens"] >= 20
    # Barely trained: no expert is negligible for any word.
    assert found["below"]["1e-08"] == 0.0


def test_posteriors_sum_to_one(train, tiny_translation_data):
    from fairseq import checkpoint_utils

    checkpoint = train("transformer_mos", "mle_cosreg", "--mixture-components", "3")
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint / "checkpoint_last.pt")],
        arg_overrides={"data": str(tiny_translation_data)},
    )
    task.load_dataset("valid")
    shares = mixture_posteriors.posteriors(models[0].eval(), task, "valid", 20)
    assert torch.allclose(shares.sum(1), torch.ones(len(shares)), atol=1e-5)
