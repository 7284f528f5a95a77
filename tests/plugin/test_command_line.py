"""What users type: each family trained, evaluated, reloaded and exported; and mishaps."""

import math
import re

import pytest
import torch

from spectral_fairseq.checkpoints.collapse import collapse_tables
from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.conftest import PACKAGE, TINY_TRANSLATION, train_command

SHARED = "--share-all-embeddings"
SHARED_LM = "--share-decoder-input-output-embed"
USER_DIR = ("--user-dir", PACKAGE)


def hypotheses(output):
    """Sentence number -> (score, text) of what fairseq-generate printed."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return {int(number): (float(score), text) for number, score, text in found}


def generate(run_cli, data, path, *more, **options):
    done = run_cli(
        *("fairseq-generate", data, "--path", path, "--beam", "2", "--batch-size", "3"),
        *("--cpu", "--source-lang", "de", "--target-lang", "en", "--max-len-b", "12"),
        *more,
        **options,
    )
    return hypotheses(done.stdout)


def texts(found):
    """The sentences of :func:`hypotheses` without their scores."""
    return {number: text for number, (_, text) in found.items()}


def samples(run_cli, data, path, folder, length):
    """Number and text of what fairseq-interactive draws to continue "w1 w2 w3" and "w4"."""
    (folder / "start.txt").write_text("w1 w2 w3\nw4\n")
    done = run_cli(
        *("fairseq-interactive", data, "--path", path, *USER_DIR, "--cpu"),
        *("--task", "language_modeling", "--input", folder / "start.txt", "--buffer-size", "2"),
        *("--sampling", "--sampling-topk", "5", "--beam", "2", "--nbest", "2"),
        *("--max-len-b", length),
    )
    found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", done.stdout, re.MULTILINE)
    assert [number for number, _ in found] == ["0", "0", "1", "1"]
    assert all(text.startswith(("w1 w2 w3", "w4")[int(number)]) for number, text in found)


def perplexity(run_cli, data, path, *more):
    done = run_cli(
        *("fairseq-eval-lm", data, "--path", path, "--gen-subset", "valid", "--cpu"),
        *("--batch-size", "2", "--tokens-per-sample", "16"),
        *more,
    )
    output = done.stdout + done.stderr
    text = (data / "valid.txt").read_text("utf-8")
    assert f"Evaluated {len(text.split()) + text.count(chr(10))} tokens" in output  # each has </s>
    return float(re.search(r"Perplexity: ([\d.]+)", output).group(1))


# The other presets differ from these in sizes alone, which test_transformers.py compares.
MIXTURE = ("--mixture-components", "3", "--mixture-dropout", "0.1")
WIDTHS = ("encoder-embed-dim", "decoder-embed-dim", "encoder-hidden-size", "decoder-hidden-size")
WIDTHS = tuple(part for name in WIDTHS for part in (f"--{name}", "16"))
# arch, criterion, further flags, and whether plain fairseq can hold the model
TRANSLATION = [
    ("transformer_sc", "spectrum_control", (), True),
    ("transformer_sc_wmt_en_de_big_t2t", "spectrum_control", (), True),
    ("transformer_wn", "regularized_cross_entropy", (), True),
    ("transformer_sc", "weight_norm", ("--embedding-type", "weight-norm"), True),
    ("transformer_sc", "weight_norm", ("--embedding-type", "spectral-norm"), True),
    ("transformer_mos", "mle_cosreg", MIXTURE, False),
    ("lstm_mos", "mle_cosreg", (*MIXTURE, *WIDTHS, "--decoder-out-embed-dim", "16"), False),
]
LANGUAGE = [
    ("transformer_lm_sc", "spectrum_control", (), True),
    ("transformer_lm_sc_gpt", "spectrum_control", (), True),
    ("transformer_lm_wn", "regularized_cross_entropy", (), True),
    ("transformer_lm_mos", "weight_norm", ("--mixture-components", "3"), False),
]


@pytest.mark.parametrize("arch, criterion, more, is_exported", TRANSLATION)
def test_translation(
    arch, criterion, more, is_exported, train, run_cli, tiny_translation_data, tmp_path
):
    folder = train(arch, criterion, SHARED, *more)
    best, plain = folder / "checkpoint_best.pt", tmp_path / "plain.pt"
    if criterion == "spectrum_control":
        log = (folder / "log.txt").read_text()
        (trained,) = re.findall(r"\| train \| epoch 001 \|(.*)", log)
        (valid,) = re.findall(r"\| valid \| epoch 001 \|(.*)", log)
        assert "spectrum" in trained and "orthogonality" in trained
        assert "spectrum" not in valid and "orthogonality" not in valid
    if arch == "transformer_wn":
        assert "decoder.embed_tokens.g" in load_checkpoint(best)["model"]
    ours = generate(run_cli, tiny_translation_data, best, *USER_DIR)
    assert len(ours) == 7  # no sentence dropped, though 7 is no multiple of 8
    done = run_cli("spectral-fairseq", "export", best, plain, rc=0 if is_exported else 2)
    if is_exported:
        # Without the plugin fairseq drops sentences, unless told to batch one by one.
        one_by_one = ("--required-batch-size-multiple", "1")
        exported = generate(run_cli, tiny_translation_data, plain, *one_by_one, cwd=tmp_path)
        assert texts(exported) == texts(ours)
    else:
        assert "distillation" in done.stderr and not plain.exists()


@pytest.mark.parametrize("arch, criterion, more, is_exported", LANGUAGE)
def test_language_model(arch, criterion, more, is_exported, train, run_cli, tiny_lm_data, tmp_path):
    folder = train(arch, criterion, SHARED_LM, *more)
    best, plain = folder / "checkpoint_best.pt", tmp_path / "plain.pt"
    if arch == "transformer_lm_wn":
        assert "decoder.embed_tokens.g" in load_checkpoint(best)["model"]
    ours = perplexity(run_cli, tiny_lm_data, best, *USER_DIR)
    log = (folder / "log.txt").read_text()
    (valid,) = re.findall(r"\| valid \| epoch 001 \|.* ppl ([\d.]+)", log)
    assert ours == pytest.approx(float(valid), rel=0.02)
    windowed = perplexity(run_cli, tiny_lm_data, best, *USER_DIR, "--context-window", "8")
    assert math.isfinite(windowed) and windowed != ours
    half = perplexity(run_cli, tiny_lm_data, best, *USER_DIR, "--bf16")
    assert half == pytest.approx(ours, rel=0.01)
    samples(run_cli, tiny_lm_data, best, tmp_path, "9")
    if is_exported:
        run_cli("spectral-fairseq", "export", best, plain)
        # Without the plugin fairseq may drop the last batch; one of all sentences cannot be.
        exported = perplexity(run_cli, tiny_lm_data, plain, "--required-batch-size-multiple", "1")
        assert exported == pytest.approx(ours, rel=1e-3)


def test_layers_are_left_out_in_translation(train, run_cli, tiny_translation_data):
    """As fairseq's examples/layerdrop has it."""
    deep = (SHARED, "--encoder-layers", "3", "--decoder-layers", "3")
    whole = train("transformer_sc", "cross_entropy", *deep) / "checkpoint_last.pt"
    kept = {f"{side}_layers_to_keep": "0,2" for side in ("encoder", "decoder")}
    pruned, plain = (
        generate(run_cli, tiny_translation_data, whole, *USER_DIR, *more)
        for more in (("--model-overrides", kept), ())
    )
    assert pruned.keys() == plain.keys() and pruned != plain


@pytest.mark.parametrize("arch, more", [
    ("transformer_sc", ()),
    ("transformer", (SHARED,)),
    ("lstm_mos", (SHARED, "--mixture-components", "2")),
    ("lstm", ()),
])  # fmt: skip
def test_file_of_vectors_is_needed_once(
    arch, more, train, run_cli, tiny_translation_data, tmp_path
):
    dictionary = (tiny_translation_data / "dict.de.txt").read_text().splitlines()
    vectors, width = tmp_path / "vectors.txt", "16" if "transformer" in arch else "12"
    row = " ".join(["0.5"] * int(width))
    words = [line.split()[0] for line in dictionary]
    vectors.write_text(f"{len(words)} {width}\n" + "".join(f"{w} {row}\n" for w in words))
    more += tuple(
        part for side in ("encoder", "decoder") for part in (f"--{side}-embed-path", vectors)
    )
    if "lstm" in arch:
        names = ("encoder-embed-dim", "decoder-embed-dim", "decoder-out-embed-dim")
        names += ("encoder-hidden-size", "decoder-hidden-size")
        more += tuple(part for name in names for part in (f"--{name}", width))
    best = train(arch, "cross_entropy", *more) / "checkpoint_best.pt"
    expected = generate(run_cli, tiny_translation_data, best, *USER_DIR)
    vectors.unlink()
    assert generate(run_cli, tiny_translation_data, best, *USER_DIR) == expected
    assert len(expected) == 7


def test_interactive_translates_each_line(train, run_cli, tiny_translation_data):
    best = train("transformer_sc", "spectrum_control", SHARED) / "checkpoint_best.pt"
    lines = (tiny_translation_data / "test.de").read_text().splitlines()
    done = run_cli(
        *("fairseq-interactive", tiny_translation_data, "--path", best, *USER_DIR, "--cpu"),
        *("--source-lang", "de", "--target-lang", "en", "--max-len-b", "12", "--beam", "2"),
        *("--input", tiny_translation_data / "test.de", "--buffer-size", "3"),
        *("--batch-size", "3"),
    )
    assert len(hypotheses(done.stdout)) == len(lines)
    generated = generate(run_cli, tiny_translation_data, best, *USER_DIR)
    assert texts(hypotheses(done.stdout)) == texts(generated)


def test_ensemble_of_a_plain_and_a_factored_model(train, run_cli, tiny_translation_data):
    ours = train("transformer_sc", "spectrum_control", SHARED) / "checkpoint_best.pt"
    plain = train("transformer", "label_smoothed_cross_entropy", SHARED) / "checkpoint_best.pt"
    both = generate(run_cli, tiny_translation_data, f"{ours}:{plain}", *USER_DIR)
    assert len(both) == 7


@pytest.mark.parametrize("joined", [True, False])
def test_lazy_penalties_where_the_task_tells_no_updates(
    joined, run_cli, tiny_translation_data, tmp_path
):
    """fairseq's multilingual task leaves out what its others do before a step.

    Without a joined dictionary it shows the criterion that of the first language alone.
    """
    data, shared = tiny_translation_data, (SHARED,)
    if not joined:
        (tmp_path / "train.de").write_text("a b c d e f g h i\n" * 8)
        (tmp_path / "train.en").write_text("A B C D E F G H I J K L M N O P Q R S T U\n" * 8)
        run_cli(
            *("fairseq-preprocess", "--source-lang", "de", "--target-lang", "en"),
            *("--trainpref", tmp_path / "train", "--validpref", tmp_path / "train"),
            *("--destdir", tmp_path / "bin"),
        )
        data, shared = tmp_path / "bin", ()
    done = run_cli(
        *("fairseq-train", data, *USER_DIR, "--cpu", "--no-save", "--save-dir", tmp_path / "saved"),
        *("--task", "multilingual_translation", "--lang-pairs", "de-en,en-de"),
        *("--arch", "multilingual_transformer", "--criterion", "mle_cosreg"),
        *(*TINY_TRANSLATION, *shared, "--optimizer", "adam", "--lr", "0.005"),
        *("--max-tokens", "10000", "--max-update", "4", "--data-buffer-size", "0"),
        *("--log-format", "simple", "--log-interval", "1"),
        *("--penalty-interval", "3", "--log-spectrum-interval", "1"),
    )
    log = done.stdout + done.stderr
    trained = re.findall(r"\| train_inner \|.* cosine=([-\d.e]+),", log)
    assert len(trained) == 4 and trained[0] == trained[1] == trained[2] != trained[3]
    valid = re.findall(r"\| valid \| epoch 00\d \|(.*)", log)
    assert ["table_mean_cosine" in line for line in valid] == [True, True, True, True]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 1), reason="no half precision on a CPU"
)
@pytest.mark.parametrize("flag", ["--fp16", "--bf16"])
def test_half_precision_generation(flag, train, run_cli, tiny_translation_data):
    best = train("transformer_sc", "spectrum_control", SHARED) / "checkpoint_best.pt"
    full = generate(run_cli, tiny_translation_data, best, *USER_DIR)
    half = generate(run_cli, tiny_translation_data, best, *USER_DIR, flag)
    assert half != full
    for number, (score, _) in full.items():
        assert half[number][0] == pytest.approx(score, rel=0.05)


@pytest.mark.parametrize("arch, more, how", [
    ("transformer_sc", (), ("--finetune-from-model",)),
    ("transformer_sc", (), ("--reset-optimizer", "--restore-file")),
    ("transformer_mos", ("--mixture-components", "3"), ("--finetune-from-model",)),
])  # fmt: skip
def test_a_plain_checkpoint_is_continued_with_factors_or_a_mixture(arch, more, how, train):
    plain = train("transformer", "label_smoothed_cross_entropy", SHARED) / "checkpoint_last.pt"
    # A learning rate of zero: what is saved is what was restored.
    more += ("--lr", "0", "--max-epoch", "9", "--max-update", "5", *how, plain)
    folder = train(arch, "spectrum_control", SHARED, *more)
    before = load_checkpoint(plain)["model"]["decoder.embed_tokens.weight"]
    after = load_checkpoint(folder / "checkpoint_last.pt")["model"]
    if arch == "transformer_mos":
        assert torch.equal(after["decoder.output_projection.table.weight"], before)
        assert "prior and contexts start anew" in (folder / "log.txt").read_text()
    else:
        dense = collapse_tables(after)["decoder.embed_tokens.weight"]
        torch.testing.assert_close(dense, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch, how, message", [
    ("transformer_wn", "--finetune-from-model", "a weight-norm or plain table in"),
    ("transformer", "--finetune-from-model", "a plain table in"),
    ("transformer", "--restore-file", "a plain table in"),
])  # fmt: skip
def test_a_table_of_another_kind_is_refused_with_the_remedy(
    arch, how, message, run_cli, train, tiny_translation_data, tmp_path
):
    factored = train("transformer_sc", "spectrum_control", SHARED) / "checkpoint_last.pt"
    argv = (arch, "mle_cosreg", SHARED, how, factored)
    command = train_command(tiny_translation_data, tmp_path / "saved", *argv)
    last = run_cli(*command, rc=1).stderr.strip().splitlines()[-1]
    assert "CheckpointError" in last and message in last and "--embedding-type svd" in last
    assert "spectral-fairseq export" in last


def hydra_command(data, save_dir):
    """A command line that trains a tiny model by a preset for two updates."""
    root = PACKAGE.parent
    if not (root / "examples" / "hydra").is_dir():
        pytest.skip("the presets are part of the source tree")
    return (
        *("fairseq-hydra-train", "--config-dir", root / "examples" / "hydra"),
        *("--config-name", "translation_sc", f"task.data={data}"),
        *("task.source_lang=de", "task.target_lang=en", f"common.user_dir={PACKAGE}"),
        *("common.cpu=true", "model.encoder_embed_dim=16", "model.decoder_embed_dim=16"),
        *("model.encoder_layers=1", "model.decoder_layers=1", "optimization.max_update=2"),
        *("dataset.max_tokens=96", f"checkpoint.save_dir={save_dir}", "dataset.num_workers=0"),
    )


def test_hydra_preset_trains_and_its_checkpoint_translates(
    run_cli, tiny_translation_data, tmp_path
):
    run_cli(*hydra_command(tiny_translation_data, tmp_path), cwd=tmp_path)
    best = tmp_path / "checkpoint_best.pt"
    assert len(generate(run_cli, tiny_translation_data, best, *USER_DIR)) == 7
    model = load_checkpoint(best)["cfg"]["model"]
    assert model["_name"] == "transformer_sc_iwslt_de_en" and model["spectrum_c1"] == "auto"


def test_validate_repeats_the_training_loops_figures(train, run_cli, tiny_translation_data):
    folder = train("transformer_sc", "spectrum_control", SHARED)
    done = run_cli(
        *("fairseq-validate", tiny_translation_data, "--path", folder / "checkpoint_last.pt"),
        *(*USER_DIR, "--task", "translation", "--source-lang", "de", "--target-lang", "en"),
        *("--cpu", "--max-tokens", "96", "--valid-subset", "valid", "--log-format", "simple"),
    )
    pattern = r"\bvalid\b.*?\| loss ([\d.]+) \| nll_loss ([\d.]+)"
    (during,) = re.findall(pattern, (folder / "log.txt").read_text())
    (after,) = re.findall(pattern, done.stdout + done.stderr)
    assert during == after
