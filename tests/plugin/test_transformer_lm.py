"""Language models: the width of the table, and what fairseq does with them."""

import math

import pytest
import torch
from fairseq import models
from fairseq.data import TruncatedDictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules.base_layer import BaseLayer
from fairseq.options import get_training_parser, parse_args_and_arch
from omegaconf import OmegaConf

from tests.plugin.conftest import (
    build_criterion,
    build_host_model,
    build_model,
)

LMS = (
    *("transformer_lm_sc", "transformer_lm_sc_gpt", "transformer_lm_mos"),
    *("transformer_lm_wn", "transformer_lm_wn_gpt"),
)


LM_SMALL = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_embed_dim": 24}


def widths(model):
    decoder = model.decoder
    return decoder.embed_tokens.embedding_dim, decoder.output_projection.table.embedding_dim


def from_command_line(task, arch, *flags):
    sizes = [part for key, value in LM_SMALL.items() for part in (f"--{key}", str(value))]
    argv = ["data", "--task", "language_modeling", "--tokens-per-sample", "16"]
    argv += ["--max-target-positions", "16", "--arch", arch]
    argv += [part.replace("_", "-") if part.startswith("--") else part for part in sizes]
    args = parse_args_and_arch(get_training_parser(), [*argv, *flags])
    return models.build_model(convert_namespace_to_omegaconf(args).model, task)


def from_node(task, arch, **flags):
    """As under fairseq-hydra-train, and from the configuration in a checkpoint."""
    config = OmegaConf.create(
        {
            "model": {"_name": arch, **LM_SMALL, "mixture_components": 3, **flags},
            "common": {"tpu": False},
            "task": {"add_bos_token": False, "tokens_per_sample": 16, "max_target_positions": 16},
        }
    )
    return models.build_model(config.model, task)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("arch", LMS)
def test_decoder_embed_dim_alone_sets_the_tables_width(task, arch, shared):
    flags = ("--share-decoder-input-output-embed",) if shared else ()
    assert widths(from_command_line(task, arch, "--decoder-embed-dim", "12", *flags)) == (12, 12)
    if not arch.endswith("_gpt"):  # hydra knows no named archs
        options = {"share_decoder_input_output_embed": shared}
        assert widths(from_node(task, arch, decoder_embed_dim=12, **options)) == (12, 12)


@pytest.mark.slow
@pytest.mark.parametrize("arch", LMS)
def test_widths_that_are_given_win(task, arch):
    flags = ("--decoder-embed-dim", "12", "--decoder-input-dim", "10", "--decoder-output-dim", "8")
    assert widths(from_command_line(task, arch, *flags)) == (10, 8)


@pytest.mark.parametrize("flags", [(), ("--decoder-normalize-before",), ("--dropout", "0.3")])
@pytest.mark.parametrize("kind", ["sc", "wn", "mos"])
def test_a_command_line_means_what_it_means_in_fairseq(task, kind, flags):
    """Nothing but the table differs, so a plain model is a start and fair to compare with."""
    width = ("--decoder-embed-dim", "12", "--decoder-input-dim", "12", "--decoder-output-dim", "12")
    flags = (*width, "--share-decoder-input-output-embed", *flags)
    plain = from_command_line(task, "transformer_lm", *flags).eval()
    table = () if kind != "mos" else ("--output-head", "softmax")
    ours = from_command_line(task, f"transformer_lm_{kind}", *flags, *table).eval()
    ours.load_state_dict(plain.state_dict(), strict=True)
    tokens = torch.arange(5, 15).view(2, 5)
    torch.testing.assert_close(ours(tokens)[0], plain(tokens)[0], rtol=1e-4, atol=1e-5)
    assert ours.decoder.dropout_module.p == plain.decoder.dropout_module.p


def test_a_checkpoint_of_other_widths_is_rebuilt_as_it_was(task):
    """fairseq's defaults, as older checkpoints hold them: 512 whatever the layers' width."""
    wide = {"decoder_embed_dim": 12, "decoder_input_dim": 20, "decoder_output_dim": 20}
    saved = from_node(task, "transformer_lm_sc", **wide)
    assert widths(saved) == (20, 20)
    assert saved.decoder.project_in_dim is not None
    assert saved.decoder.project_out_dim is not None


@pytest.mark.parametrize("embedding_type", ["plain", "svd", "weight-norm"])
def test_a_cut_output_dictionary_has_rows_of_its_own(task, embedding_type):
    """``--output-dictionary-size``, of a dictionary that ends in made-up words."""
    task.target_dictionary = TruncatedDictionary(task.source_dictionary, 30)
    flags = {"embedding_type": embedding_type, "decoder_embed_dim": 8}
    model = from_node(task, "transformer_lm_mos", **flags)
    assert model.decoder.output_projection.table.weight.shape == (30, 8)
    by_count = {"weight_norm_weight": 1.0, "weight_norm_target_by_count": True}
    penalties = build_criterion(task, "mle_cosreg", **by_count).objective_of(model).penalties(0)
    assert all(math.isfinite(penalty.value) for penalty in penalties)


@pytest.fixture
def one_worker():
    """A process group of one."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_base_layers_are_where_fairseq_has_them(task, one_worker, monkeypatch):
    """The archs of this package left out what ``--base-layers`` adds."""
    monkeypatch.setattr(BaseLayer, "load_assignment", lambda self: None)  # of another torch
    sizes = {"decoder_layers": 2, "base_layers": 1}
    models = build_model(task, **sizes), build_host_model(task, "transformer", **sizes)
    ours, fairseqs = ([type(layer) is BaseLayer for layer in m.decoder.layers] for m in models)
    assert ours == fairseqs == [False, True, False]
