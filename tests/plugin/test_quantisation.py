"""fairseq's quantisation: what it would take from under a feature is refused before training."""

import pytest
from fairseq.quantization_utils import Quantizer, quantize_model_scalar
from omegaconf import OmegaConf

from spectral_fairseq.errors import UnsupportedError
from tests.plugin.conftest import build_model
from tests.plugin.trainers import build_trainer, train

TABLE, LAYERS = r"(en|de)coder\.(embed_tokens|output_projection)", r"decoder\.layers\.\d+\.fc[12]"


def untied(task):
    return build_model(
        task,
        "transformer_sc",
        embedding_type="plain",
        share_all_embeddings=False,
        share_decoder_input_output_embed=False,
    )


def quantised(tmp_path, pattern, max_update=0, tied=True, **options):
    """A trainer before its first epoch, with product quantisation in one stage."""
    trainer = build_trainer(begin=False, **options)
    if not tied:
        trainer._model = untied(trainer.task)
    path = tmp_path / "pq.yaml"
    OmegaConf.save(
        {
            "n_centroids": {
                "Linear": {"key": "in_features", "value": {"*": 4}},
                "Embedding": {"key": "embedding_dim", "value": {"*": 4}},
            },
            "block_sizes": {
                "Linear": {"key": "fuzzy_name", "value": {"*": 4}},
                "Embedding": {"key": "fuzzy_name", "value": {"*": 4}},
            },
            "layers_to_quantize": [pattern],
        },
        path,
    )
    trainer.quantizer = Quantizer(str(path), 0 if max_update else 1, max_update)
    trainer.quantizer.set_trainer(trainer)
    return trainer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("flags", [
    {"spectrum_decay": 0.5},
    {"table_centering": 0.5},
    {"simcut_weight": 1.0},
    {"table_lr_scale": 0.5},
    {"table_weight_decay": 0.5},
])  # fmt: skip
def test_a_flag_whose_table_is_replaced(tmp_path, tied, flags):
    """The control changed a parameter that the optimiser no longer held, without a word."""
    trainer = quantised(tmp_path, TABLE, tied=tied, **flags)
    OmegaConf.set_struct(trainer.cfg, False)
    trainer.cfg.criterion.update(flags)
    flag = "--" + next(iter(flags)).replace("_", "-")
    with pytest.raises(UnsupportedError, match=f"(?s){flag}.*replaces .*layers_to_quantize"):
        trainer.begin_epoch(1)


@pytest.mark.parametrize("table", ["svd", "weight-norm", "spectral-norm"])
@pytest.mark.parametrize("pattern", [r"(en|de)coder\.embed_tokens", r".*"])
def test_a_table_of_this_package_that_is_replaced(tmp_path, table, pattern):
    """It was a KeyError of fairseq, after the stages before."""
    trainer = quantised(tmp_path, pattern, table=table)
    with pytest.raises(UnsupportedError, match=r"replaces (en|de)coder\.embed_tokens"):
        trainer.begin_epoch(1)


def test_a_layer_of_a_head_that_is_replaced(tmp_path):
    trainer = quantised(tmp_path, r"decoder\.output_projection", arch="transformer_mos")
    with pytest.raises(UnsupportedError, match=r"replaces decoder\.output_projection"):
        trainer.begin_epoch(1)


def test_optimisers_that_hold_what_is_replaced_or_have_to_last(tmp_path):
    for name, pattern, max_update in (
        ("coupled_adam", TABLE, 0),
        ("coupled_adam", LAYERS, 2),
        ("muon", LAYERS, 0),
        ("nt_asgd", LAYERS, 0),
    ):
        trainer = quantised(tmp_path, pattern, max_update)
        OmegaConf.set_struct(trainer.cfg, False)
        trainer.cfg.optimizer._name = name
        with pytest.raises(UnsupportedError, match=f"--optimizer {name}; found --quantization"):
            trainer.begin_epoch(1)


@pytest.mark.parametrize("flags", [{"spectrum_decay": 0.5}, {"cosreg_weight": 1.0}])
@pytest.mark.parametrize("table", ["plain", "svd"])
def test_other_layers_are_quantised_as_ever(tmp_path, table, flags):
    if table == "svd":
        flags = {"spectrum_weight": 0.1, "svd_interval": 1}
    trainer = quantised(tmp_path, LAYERS, table=table, **flags)
    trainer.begin_epoch(1)
    train(trainer, 2)
    assert type(trainer.get_model().decoder.layers[0].fc1).__name__ == "PQLinear"


@pytest.mark.parametrize("flags, refused", [
    ({"loss_form": "blockwise"}, "--loss-form blockwise"),
    ({"gradient_gating": 0.02}, "--gradient-gating"),
    ({"rdrop_weight": 1.0}, "--rdrop-weight"),
    ({"simcut_weight": 1.0}, "--simcut-weight"),
    ({"rdrop_weight": 1.0, "loss_form": "dense"}, ""),
    ({"adversarial_epsilon": 0.1}, ""),
    ({}, ""),
])  # fmt: skip
@pytest.mark.parametrize("is_quantised", [True, False])
def test_scores_beside_an_output_layer_with_quantisation_noise(flags, refused, is_quantised):
    """They were those of the table as it is, so that the noise was lost without a word.

    With tied tables fairseq itself leaves the output layer as it is.
    """
    trainer = build_trainer(begin=False, **flags)
    trainer._model = untied(trainer.task) if is_quantised else trainer.get_model()
    OmegaConf.set_struct(trainer.cfg, False)
    trainer.cfg.model.quant_noise_scalar = 0.1
    quantize_model_scalar(trainer.get_model(), trainer.cfg.model)
    if refused and is_quantised:
        with pytest.raises(UnsupportedError, match=f"{refused}; found --quant-noise-scalar"):
            trainer.begin_epoch(1)
    else:
        trainer.begin_epoch(1)
