"""What users type: each family trained, evaluated, reloaded and exported; and mishaps."""

import re

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.conftest import PACKAGE, TINY_TRANSLATION
from tests.plugin.trainers import same_states

# The other presets differ from these in sizes alone, which test_architectures.py compares.
TRANSLATION = ["transformer_sc", "transformer_sc_wmt_en_de_big_t2t"]
LANGUAGE = ["transformer_lm_sc", "transformer_lm_sc_gpt"]
WEIGHT_NORM = ["transformer_wn", "transformer_lm_wn"]
MIXTURES = ["transformer_mos", "lstm_mos"]
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


def perplexity(run_cli, data, path, *more):
    done = run_cli(
        *("fairseq-eval-lm", data, "--path", path, "--gen-subset", "valid", "--cpu"),
        *("--batch-size", "2", "--tokens-per-sample", "16"),
        *more,
    )
    return float(re.search(r"Perplexity: ([\d.]+)", done.stdout + done.stderr).group(1))


@pytest.mark.parametrize("arch", TRANSLATION)
def test_translation_arch(arch, train, run_cli, tiny_translation_data, tmp_path):
    folder = train(arch, "spectrum_control", SHARED)
    log = (folder / "log.txt").read_text()
    (trained,) = re.findall(r"\| train \| epoch 001 \|(.*)", log)
    (valid,) = re.findall(r"\| valid \| epoch 001 \|(.*)", log)
    assert "spectrum" in trained and "orthogonality" in trained
    assert "spectrum" not in valid and "orthogonality" not in valid
    best = folder / "checkpoint_best.pt"
    ours = generate(run_cli, tiny_translation_data, best, *USER_DIR)
    assert len(ours) == 7  # no sentence dropped, though 7 is no multiple of 8
    plain = tmp_path / "plain.pt"
    run_cli("spectral-fairseq", "export", best, plain)
    # Without the plugin fairseq drops sentences, unless told to batch one by one.
    one_by_one = ("--required-batch-size-multiple", "1")
    exported = generate(run_cli, tiny_translation_data, plain, *one_by_one, cwd=tmp_path)
    assert {k: text for k, (_, text) in exported.items()} == {
        k: text for k, (_, text) in ours.items()
    }


@pytest.mark.parametrize("arch, sides, more", [
    ("transformer_sc", ("encoder", "decoder"), (SHARED,)),
    ("transformer_mos", ("decoder",), (SHARED, "--mixture-components", "2")),
    ("transformer", ("encoder",), ()),
    ("transformer_lm_sc", ("decoder",), ("--embedding-type", "plain")),
])  # fmt: skip
def test_kept_layers(
    arch, sides, more, train, run_cli, tiny_translation_data, tiny_lm_data, tmp_path
):
    """What LayerDrop's pruning saves can be translated with, resumed, exported and averaged."""
    depth = [part for side in sides for part in (f"--{side}-layers", "3")]
    keep = [part for side in sides for part in (f"--{side}-layers-to-keep", "0,2")]
    run = (arch, "cross_entropy", *more, *depth, "--lr", "0")
    whole = train(*run) / "checkpoint_last.pt"
    save = tmp_path / "pruned"
    cut = (*run, *keep, "--finetune-from-model", whole, "--save-dir", save)
    anew = train(*run, *keep) / "checkpoint_last.pt"  # loads no weights
    for arguments in (cut, (*cut, "--max-epoch", "2", "--max-update", "8")):
        train(*arguments)
        saved = load_checkpoint(save / "checkpoint_last.pt")
        settings = saved["cfg"]["model"]
        settings = settings if isinstance(settings, dict) else vars(settings)
        weights = load_checkpoint(whole)["model"]
        for side in sides:
            assert settings[f"{side}_layers"] == 2 and settings[f"{side}_layers_to_keep"] is None
            for to, source in ((0, 0), (1, 2)):
                name = f"{side}.layers.{{}}.fc1.weight"
                assert torch.equal(saved["model"][name.format(to)], weights[name.format(source)])
            assert name.format(2) not in saved["model"]
    assert saved["optimizer_history"][-1]["num_updates"] == 8  # it was resumed
    average = tmp_path / "average.pt"
    run_cli("spectral-fairseq", "average", save / "checkpoint_last.pt", "--output", average)
    paths = [save / "checkpoint_last.pt", anew, average]
    if arch in ("transformer_sc", "transformer_lm_sc"):
        run_cli("spectral-fairseq", "export", paths[0], tmp_path / "plain.pt")
        paths.append(tmp_path / "plain.pt")
    for path in paths:
        if "_lm" in arch:
            assert perplexity(run_cli, tiny_lm_data, path, *USER_DIR) > 1
        else:
            assert len(generate(run_cli, tiny_translation_data, path, *USER_DIR)) == 7
    if "_lm" not in arch:  # as fairseq's examples/layerdrop does
        overrides = {f"{side}_layers_to_keep": "0,2" for side in sides}
        pruned = generate(
            run_cli, tiny_translation_data, whole, *USER_DIR, "--model-overrides", overrides
        )
        assert pruned == generate(run_cli, tiny_translation_data, paths[0], *USER_DIR)


@pytest.mark.parametrize("arch, more", [
    ("transformer_sc", ()),
    ("transformer_sc", (SHARED,)),
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


@pytest.mark.parametrize("arch", WEIGHT_NORM)
def test_weight_norm_arch(arch, train, run_cli, tiny_translation_data, tiny_lm_data, tmp_path):
    language = arch.startswith("transformer_lm")
    sharing = SHARED_LM if language else SHARED
    best = train(arch, "regularized_cross_entropy", sharing) / "checkpoint_best.pt"
    assert "decoder.embed_tokens.g" in load_checkpoint(best)["model"]
    plain = tmp_path / "plain.pt"
    run_cli("spectral-fairseq", "export", best, plain)
    if language:
        ours = perplexity(run_cli, tiny_lm_data, best, *USER_DIR)
        exported = perplexity(run_cli, tiny_lm_data, plain, *USER_DIR)
        assert exported == pytest.approx(ours, rel=1e-3)
    else:
        ours = generate(run_cli, tiny_translation_data, best, *USER_DIR)
        assert len(ours) == 7
        exported = generate(run_cli, tiny_translation_data, plain, *USER_DIR)
        assert {k: t for k, (_, t) in exported.items()} == {k: t for k, (_, t) in ours.items()}


@pytest.mark.parametrize("arch", MIXTURES)
def test_mixture_arch(arch, train, run_cli, tiny_translation_data, tmp_path):
    more = ("--mixture-components", "3", "--mixture-dropout", "0.1")
    if arch == "lstm_mos":
        more += (*("--encoder-embed-dim", "16", "--decoder-embed-dim", "16"),)
        more += (*("--encoder-hidden-size", "16", "--decoder-hidden-size", "16"),)
        more += (*("--decoder-out-embed-dim", "16"),)
    best = train(arch, "mle_cosreg", SHARED, *more) / "checkpoint_best.pt"
    assert len(generate(run_cli, tiny_translation_data, best, *USER_DIR)) == 7
    refused = run_cli("spectral-fairseq", "export", best, tmp_path / "plain.pt", rc=2)
    assert "distillation" in refused.stderr and not (tmp_path / "plain.pt").exists()


def test_mixture_language_model(train, run_cli, tiny_lm_data):
    more = ("--mixture-components", "3", SHARED_LM)
    folder = train("transformer_lm_mos", "weight_norm", *more)
    log = (folder / "log.txt").read_text()
    (valid,) = re.findall(r"\| valid \| epoch 001 \|.* ppl ([\d.]+)", log)
    found = perplexity(run_cli, tiny_lm_data, folder / "checkpoint_best.pt", *USER_DIR)
    assert found == pytest.approx(float(valid), rel=0.02)


@pytest.mark.parametrize("kind", ["weight-norm", "spectral-norm"])
def test_normalised_table(train, run_cli, tiny_translation_data, tmp_path, kind):
    more = (SHARED, "--embedding-type", kind)
    best = train("transformer_sc", "weight_norm", *more) / "checkpoint_best.pt"
    ours = generate(run_cli, tiny_translation_data, best, *USER_DIR)
    plain = tmp_path / "plain.pt"
    run_cli("spectral-fairseq", "export", best, plain)
    one_by_one = ("--required-batch-size-multiple", "1")
    exported = generate(run_cli, tiny_translation_data, plain, *one_by_one, cwd=tmp_path)
    assert {k: t for k, (_, t) in exported.items()} == {k: t for k, (_, t) in ours.items()}


def test_weight_norm_schedule_resumes_in_the_middle(train):
    """After two of four epochs of one batch each.

    fairseq composes batches anew for the epoch in which it resumes, and only for that one, so
    that a run over several batches an epoch does not repeat itself even with its own archs.
    """
    run = ("transformer_wn", "weight_norm", SHARED)
    run += ("--weight-norm-gradient-epochs", "4", "--dropout", "0", "--max-tokens", "10000")
    run += ("--optimizer", "sgd", "--lr", "0.5", "--max-update", "9")
    through, half = train(*run, "--max-epoch", 4), train(*run, "--max-epoch", 2)
    restored = ("--restore-file", half / "checkpoint_last.pt")
    resumed = train(*run, "--max-epoch", 4, *restored)
    models = [load_checkpoint(f / "checkpoint_last.pt")["model"] for f in (through, half, resumed)]
    for key in models[0]:
        torch.testing.assert_close(models[2][key], models[0][key], rtol=1e-4, atol=1e-6)
    lengths = "decoder.embed_tokens.g"
    assert (models[0][lengths] - models[1][lengths]).abs().max() > 1e-4


@pytest.mark.parametrize("arch", LANGUAGE)
def test_language_model_arch(arch, train, run_cli, tiny_lm_data, tmp_path):
    folder = train(arch, "spectrum_control", SHARED_LM)
    best = folder / "checkpoint_best.pt"
    ours = perplexity(run_cli, tiny_lm_data, best, *USER_DIR)
    (valid,) = re.findall(
        r"\| valid \| epoch 001 \|.* ppl ([\d.]+)", (folder / "log.txt").read_text()
    )
    assert ours == pytest.approx(float(valid), rel=0.02)
    plain = tmp_path / "plain.pt"
    run_cli("spectral-fairseq", "export", best, plain)
    # Without the plugin fairseq may drop the last batch; one batch of all sentences cannot be.
    assert perplexity(
        run_cli, tiny_lm_data, plain, "--required-batch-size-multiple", "1"
    ) == pytest.approx(ours, rel=1e-3)


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
    assert {k: t for k, (_, t) in hypotheses(done.stdout).items()} == {
        k: t for k, (_, t) in generated.items()
    }


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
def test_half_precision_generation(train, run_cli, tiny_translation_data):
    best = train("transformer_sc", "spectrum_control", SHARED) / "checkpoint_best.pt"
    full = generate(run_cli, tiny_translation_data, best, *USER_DIR)
    half = generate(run_cli, tiny_translation_data, best, *USER_DIR, "--fp16")
    for number, (score, _) in full.items():
        assert half[number][0] == pytest.approx(score, rel=0.05)


def same_models(first, second):
    return same_states(
        *(load_checkpoint(folder / "checkpoint_last.pt")["model"] for folder in (first, second))
    )


def test_resumed_equals_uninterrupted(train):
    """In the middle of an epoch, with a table that is off its constraint set."""
    run = ("transformer_sc", "spectrum_control", SHARED, "--max-epoch", 3)
    run += ("--spectrum-weight", "0.1", "--orthogonality-weights", "0.1,0.1,0.1,0.1")
    through = train(*run, "--max-update", 7)
    half = train(*run, "--max-update", 3)
    resumed = train(*run, "--max-update", 7, "--restore-file", half / "checkpoint_last.pt")
    assert not same_models(half, through)
    assert same_models(resumed, through)


@pytest.mark.parametrize(
    "how", [("--finetune-from-model",), ("--reset-optimizer", "--restore-file")]
)
def test_a_plain_checkpoint_is_continued_with_a_factored_table(how, train):
    plain = train("transformer", "label_smoothed_cross_entropy", SHARED) / "checkpoint_last.pt"
    # A learning rate of zero: what is saved is what was restored.
    options = ("--lr", "0", "--max-epoch", "9", "--max-update", "5")
    folder = train("transformer_sc", "spectrum_control", SHARED, *options, *how, plain)
    before = load_checkpoint(plain)["model"]["decoder.embed_tokens.weight"]
    after = load_checkpoint(folder / "checkpoint_last.pt")["model"]
    prefix = "decoder.embed_tokens."
    dense = (after[prefix + "U"] * after[prefix + "sigma"]) @ (after[prefix + "V"] / 16).t()
    torch.testing.assert_close(dense, before, rtol=1e-4, atol=1e-5)


def test_layers_are_pruned_after_layer_drop(train):
    """The flag ended in ``AnyNode is not a ListConfig``."""
    path = str(
        train("transformer_sc", "mle_cosreg", SHARED, "--decoder-layers", 2) / "checkpoint_last.pt"
    )
    (whole,), _, _ = load_model_ensemble_and_task([path])
    (pruned,), _, _ = load_model_ensemble_and_task(
        [path], arg_overrides={"encoder_layers_to_keep": "0", "decoder_layers_to_keep": "1"}
    )
    (kept,) = pruned.decoder.layers
    assert torch.equal(kept.fc1.weight, whole.decoder.layers[1].fc1.weight)


def test_a_plain_checkpoint_is_continued_with_a_mixture(train):
    plain = train("transformer", "label_smoothed_cross_entropy", SHARED) / "checkpoint_last.pt"
    options = ("--lr", "0", "--max-epoch", "9", "--max-update", "5", "--mixture-components", "3")
    start = ("--finetune-from-model", plain)
    folder = train("transformer_mos", "spectrum_control", SHARED, *options, *start)
    before = load_checkpoint(plain)["model"]["decoder.embed_tokens.weight"]
    after = load_checkpoint(folder / "checkpoint_last.pt")["model"]
    assert torch.equal(after["decoder.output_projection.table.weight"], before)
    assert "prior and contexts start anew" in (folder / "log.txt").read_text()


@pytest.mark.parametrize(
    "arch, how, message",
    [
        ("transformer_wn", "--finetune-from-model", "a weight-norm or plain table in"),
        ("transformer", "--finetune-from-model", "a plain table in"),
        ("transformer", "--restore-file", "a plain table in"),
    ],
)
def test_a_table_of_another_kind_is_refused_with_the_remedy(
    arch, how, message, run_cli, train, tiny_translation_data, tmp_path
):
    factored = train("transformer_sc", "spectrum_control", SHARED) / "checkpoint_last.pt"
    argv = ("--arch", arch, "--criterion", "mle_cosreg", SHARED, how, factored)
    output = failing(run_cli, tiny_translation_data, tmp_path / "saved", *argv)
    last = output.strip().splitlines()[-1]
    assert "CheckpointError" in last and message in last and "--embedding-type svd" in last
    assert "spectral-fairseq export" in last


@pytest.mark.parametrize("criterion", ["spectrum_control", "mle_cosreg", "weight_norm"])
def test_two_workers_equal_one_with_update_freq_two(
    criterion, run_on_two_workers, train, tiny_translation_data, tmp_path
):
    more = ("--batch-size", "6", "--max-tokens", "1000", "--max-update", "3", "--dropout", "0")
    more += ("--orthogonality-weights", "0.1,0.1,0.1,0.1", "--spectrum-weight", "0.1")
    more += ("--cosreg-weight", "1", "--weight-norm-weight", "0.1", "--optimizer", "sgd")
    more += ("--lr", "0.1", "--no-epoch-checkpoints")
    one = train("transformer_sc", criterion, SHARED, "--update-freq", "2", *more)
    two = tmp_path / "two"
    run_on_two_workers(
        *(tiny_translation_data, *USER_DIR, "--save-dir", two, "--arch", "transformer_sc"),
        *("--criterion", criterion, "--task", "translation", "--source-lang", "de"),
        *("--target-lang", "en", *TINY_TRANSLATION, "--seed", "1", "--max-epoch", "1"),
        *(SHARED, *more),
    )
    first, second = (load_checkpoint(f / "checkpoint_last.pt")["model"] for f in (one, two))
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-5, atol=1e-6)


def test_hydra_preset_trains_and_its_checkpoint_translates(
    run_cli, tiny_translation_data, tmp_path
):
    root = PACKAGE.parent
    if not (root / "examples" / "hydra").is_dir():
        pytest.skip("the presets are part of the source tree")
    run_cli(
        *("fairseq-hydra-train", "--config-dir", root / "examples" / "hydra"),
        *("--config-name", "translation_sc", f"task.data={tiny_translation_data}"),
        *("task.source_lang=de", "task.target_lang=en", f"common.user_dir={PACKAGE}"),
        *("common.cpu=true", "model.encoder_embed_dim=16", "model.decoder_embed_dim=16"),
        *("model.encoder_layers=1", "model.decoder_layers=1", "optimization.max_update=2"),
        *("dataset.max_tokens=96", f"checkpoint.save_dir={tmp_path}", "dataset.num_workers=0"),
        cwd=tmp_path,
    )
    best = tmp_path / "checkpoint_best.pt"
    assert len(generate(run_cli, tiny_translation_data, best, *USER_DIR)) == 7
    model = load_checkpoint(best)["cfg"]["model"]
    assert model["_name"] == "transformer_sc_iwslt_de_en" and model["spectrum_c1"] == "auto"


def failing(run_cli, data, folder, *argv):
    done = run_cli(
        *("fairseq-train", data, *USER_DIR, "--save-dir", folder, "--task", "translation"),
        *("--source-lang", "de", "--target-lang", "en", "--optimizer", "adam", "--lr", "0.001"),
        *("--max-tokens", "96", "--max-update", "2", "--num-workers", "0"),
        *(*TINY_TRANSLATION, *argv),
        rc=None,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ("--arch", "transformer", "--criterion", "spectrum_control")
            + ("--orthogonality-weights", "0.1,0.1,0,0"),
            "--embedding-type svd",
        ),
        (
            ("--arch", "transformer_sc", "--criterion", "spectrum_control")
            + ("--encoder-embed-dim", "64", "--decoder-embed-dim", "64", SHARED),
            "N >= d",
        ),
        (
            ("--arch", "transformer_sc", "--criterion", "spectrum_control")
            + ("--spectrum-prior", "linear"),
            "invalid choice: 'linear'",
        ),
        (
            ("--arch", "transformer_sc", "--criterion", "spectrum_control")
            + ("--orthogonality-weights", "1,2,3"),
            "four numbers",
        ),
    ],
)
def test_bad_input_stops_before_training(argv, message, run_cli, tiny_translation_data, tmp_path):
    output = failing(run_cli, tiny_translation_data, tmp_path / "saved", *argv)
    assert message in output
    assert not list((tmp_path / "saved").glob("*.pt"))


def test_a_truncated_checkpoint_is_named_and_left_alone(
    run_cli, train, tiny_translation_data, tmp_path
):
    good = train("transformer_sc", "spectrum_control", SHARED) / "checkpoint_last.pt"
    bad = tmp_path / "checkpoint_last.pt"
    bad.write_bytes(good.read_bytes()[:2000])
    argv = ("--arch", "transformer_sc", "--criterion", "spectrum_control", SHARED)
    output = failing(run_cli, tiny_translation_data, tmp_path, *argv)
    assert "DamagedError" in output and str(bad) in output
    assert bad.stat().st_size == 2000
