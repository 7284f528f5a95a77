"""The Transformer language models: width of the table, and what fairseq does with them."""

import math
import re

import pytest
from fairseq import models, options
from fairseq.data import TruncatedDictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from tests.conftest import PACKAGE
from tests.plugin.conftest import build_criterion

ARCHS = (
    *("transformer_lm_sc", "transformer_lm_sc_gpt", "transformer_lm_mos"),
    *("transformer_lm_wn", "transformer_lm_wn_gpt"),
)
SIZES = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_embed_dim": 24}
USER_DIR = ("--user-dir", PACKAGE)


def widths(model):
    decoder = model.decoder
    return decoder.embed_tokens.embedding_dim, decoder.output_projection.table.embedding_dim


def from_command_line(task, arch, *flags):
    sizes = [part for key, value in SIZES.items() for part in (f"--{key}", str(value))]
    argv = ["data", "--task", "language_modeling", "--tokens-per-sample", "16"]
    argv += ["--max-target-positions", "16", "--mixture-components", "3", "--arch", arch]
    argv += [part.replace("_", "-") if part.startswith("--") else part for part in sizes]
    args = options.parse_args_and_arch(options.get_training_parser(), [*argv, *flags])
    return models.build_model(convert_namespace_to_omegaconf(args).model, task)


def from_node(task, arch, **flags):
    """As under fairseq-hydra-train, and from the configuration in a checkpoint."""
    config = OmegaConf.create(
        {
            "model": {"_name": arch, **SIZES, "mixture_components": 3, **flags},
            "common": {"tpu": False},
            "task": {"add_bos_token": False, "tokens_per_sample": 16, "max_target_positions": 16},
        }
    )
    return models.build_model(config.model, task)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_decoder_embed_dim_alone_sets_the_tables_width(task, arch, shared):
    flags = ("--share-decoder-input-output-embed",) if shared else ()
    assert widths(from_command_line(task, arch, "--decoder-embed-dim", "12", *flags)) == (12, 12)
    if not arch.endswith("_gpt"):  # hydra knows no named archs
        options = {"share_decoder_input_output_embed": shared}
        assert widths(from_node(task, arch, decoder_embed_dim=12, **options)) == (12, 12)


@pytest.mark.parametrize("arch", ARCHS)
def test_widths_that_are_given_win(task, arch):
    flags = ("--decoder-embed-dim", "12", "--decoder-input-dim", "10", "--decoder-output-dim", "8")
    assert widths(from_command_line(task, arch, *flags)) == (10, 8)


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


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["transformer_lm_sc", "transformer_lm_mos"])
def test_through_the_command_line(arch, run_cli, tiny_lm_data, tmp_path):
    """Trained with one width, scored with and without a window of context, and sampled from."""
    run_cli(
        *("fairseq-train", tiny_lm_data, *USER_DIR, "--save-dir", tmp_path, "--arch", arch),
        *("--task", "language_modeling", "--tokens-per-sample", "16", "--cpu"),
        *("--criterion", "spectrum_control" if arch.endswith("_sc") else "mle_cosreg"),
        *("--decoder-embed-dim", "12", "--decoder-layers", "1", "--decoder-attention-heads", "2"),
        *("--decoder-ffn-embed-dim", "24", "--share-decoder-input-output-embed"),
        *("--mixture-components", "3", "--optimizer", "adam", "--lr", "0.005", "--batch-size", "4"),
        *("--max-update", "3", "--num-workers", "0", "--data-buffer-size", "0", "--seed", "1"),
        cwd=tmp_path,
    )
    path = tmp_path / "checkpoint_last.pt"
    found = []
    for window in ("0", "8"):
        done = run_cli(
            *("fairseq-eval-lm", tiny_lm_data, "--path", path, *USER_DIR, "--gen-subset", "valid"),
            *("--tokens-per-sample", "16", "--context-window", window, "--batch-size", "2"),
            "--cpu",
        )
        output = done.stdout + done.stderr
        tokens = int(re.search(r"Evaluated (\d+) tokens", output).group(1))
        found.append((tokens, float(re.search(r"Perplexity: ([\d.]+)", output).group(1))))
    (tokens, without), (same, within) = found
    assert same == tokens and math.isfinite(without) and within != without
    (tmp_path / "start.txt").write_text("w1 w2 w3\nw4\n")
    done = run_cli(
        *("fairseq-interactive", tiny_lm_data, "--path", path, *USER_DIR, "--cpu"),
        *("--task", "language_modeling", "--input", tmp_path / "start.txt", "--buffer-size", "2"),
        *("--sampling", "--sampling-topk", "5", "--beam", "2", "--max-len-b", "9", "--nbest", "2"),
    )
    samples = re.findall(r"^H-(\d+)\t\S+\t(.*)$", done.stdout, re.MULTILINE)
    assert [number for number, _ in samples] == ["0", "0", "1", "1"]
    assert all(text.startswith(("w1 w2 w3", "w4")[int(number)]) for number, text in samples)
