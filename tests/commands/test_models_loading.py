"""Language models built from checkpoints, and those that are refused."""

import pytest
import torch

from spectral_fairseq.commands.models import load_language_model
from spectral_fairseq.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    MissingDataError,
    UnsupportedError,
)
from tests.language_models import block_checkpoint, stateful_checkpoint


def test_overrides_reach_the_model(train, tiny_lm_data):
    path = stateful_checkpoint(train)
    model = load_language_model(path, tiny_lm_data, {"weight_drop": 0.25}).model
    assert model.decoder.network.layers[0].weight_drop == 0.25
    with pytest.raises(ConfigurationError, match="'weight_dorp'.*Did you mean.*weight_drop"):
        load_language_model(path, tiny_lm_data, {"weight_dorp": 0.25})
    with pytest.raises(ConfigurationError, match=r"^expected --weight-drop in \[0, 1\)"):
        load_language_model(path, tiny_lm_data, {"weight_drop": 1.5})
    with pytest.raises(DataError, match="override only"):
        load_language_model(path, tiny_lm_data, {"decoder_hidden_size": 13})


def test_what_is_no_language_model_is_refused(train, tiny_lm_data, tiny_translation_data, tmp_path):
    translation = train("transformer", "cross_entropy", "--share-all-embeddings")
    with pytest.raises(CheckpointError, match="with an encoder"):
        load_language_model(translation / "checkpoint_last.pt", tiny_lm_data, {})
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="without a decoder"):
        load_language_model(tmp_path / "other.pt", tiny_lm_data, {})
    with pytest.raises(CheckpointError, match="no such file"):
        load_language_model(tmp_path / "absent.pt", tiny_lm_data, {})


def test_other_data_are_refused(train, tiny_lm_data, tiny_translation_data, tmp_path):
    path = block_checkpoint(train)
    with pytest.raises(MissingDataError, match="dict.txt"):
        load_language_model(path, tiny_translation_data, {})
    words = (tiny_lm_data / "dict.txt").read_text("utf-8")
    (tmp_path / "dict.txt").write_text(words + "".join(f"more{i} 1\n" for i in range(8)), "utf-8")
    with pytest.raises(DataError, match="fit the dictionary"):
        load_language_model(path, tmp_path, {})
    loaded = load_language_model(path, tiny_lm_data, {})
    assert loaded.remark is None
    lines = words.splitlines(keepends=True)
    (tmp_path / "dict.txt").write_text("".join([lines[1], lines[0], *lines[2:]]), "utf-8")
    assert "order" in load_language_model(path, tmp_path, {}).remark


def test_texts_that_start_otherwise_are_refused(train, tiny_lm_data):
    with pytest.raises(UnsupportedError, match="add-bos-token.*fairseq-eval-lm"):
        load_language_model(block_checkpoint(train), tiny_lm_data, {"add_bos_token": True})
