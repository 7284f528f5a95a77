"""Every benchmark still starts and prints its figures, at sizes at which they mean nothing."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import (
    bars,
    bench_allocator,
    bench_analysis,
    bench_awd_lstm,
    bench_block_memory,
    bench_by_products,
    bench_consistency,
    bench_ctranslate2,
    bench_decoding,
    bench_fused_loss,
    bench_loss_form,
    bench_mixture,
    bench_penalties,
    bench_processes,
    bench_products,
    bench_spectrum_decay,
    bench_step,
    bench_training,
    bench_update,
    harness,
)
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import train as gpu_train
from benchmarks.gpu.report import Report


@pytest.fixture
def figures(monkeypatch, capsys):
    """Run a benchmark's ``main`` and return the JSON of its last line.

    The memory of a process of its own takes seconds a figure: only one test measures it.
    """

    def run(module, *argv):
        monkeypatch.setattr(harness, "in_fresh_process", lambda *_: 1.0)
        modules = (bench_step, bench_spectrum_decay, bench_consistency, bench_training)
        for one in (*modules, bench_by_products):
            monkeypatch.setattr(one, "in_fresh_process", lambda *_: 1.0)
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
        module.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.parametrize(
    "module, flag",
    [
        (bench_step, "--pairs"),
        (bench_penalties, "--repetitions"),
        (bench_mixture, "--components"),
        (bench_decoding, "--repetitions"),
        (bench_ctranslate2, "--turns"),
        (bench_analysis, "--rows"),
        (bench_awd_lstm, "--repetitions"),
        (bench_block_memory, "--batches"),
        (bench_spectrum_decay, "--pairs"),
        (bench_consistency, "--pairs"),
        (bench_training, "--pairs"),
        (bench_processes, "--updates"),
        (bench_loss_form, "--threads"),
        (bench_by_products, "--turns"),
        (bench_fused_loss, "--tokens"),
        (bench_products, "--seconds"),
        (bench_update, "--turns"),
    ],
)
def test_numbers_that_measure_nothing_are_refused_at_once(module, flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.__name__, flag, "0"])
    with pytest.raises(SystemExit):
        module.main()
    assert f"argument {flag}: expected a number of at least 1; found 0" in capsys.readouterr().err


def test_the_forms_of_the_loss_take_turns(figures):
    inputs = torch.randn(7, 5), torch.randint(11, (7,)), torch.randn(11, 5)
    torch.testing.assert_close(bench_loss_form.blockwise(*inputs), bench_loss_form.dense(*inputs))
    (row,) = figures(bench_loss_form, "--quick")["rows"]
    assert 0 < row["lowest"] <= row["time"] <= row["highest"]


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "scaled_dot_product_attention"),
    reason="this torch has no attention of its own to compare",
)
def test_products_are_compared_and_the_choice_is_said(figures):
    found = figures(bench_products, "--quick", "--seconds", "1", "--bfloat16")
    assert {row["layer"] for row in found["rows"]} == {"linear", "attention"}
    assert all(row[name] > 0 for row in found["rows"] for name in ("ms", "oneDNN", "bfloat16"))
    assert found["auto"].split(":")[0] in ("oneDNN", "as torch comes")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["parity", "speed"])
def test_what_is_to_be_run_on_a_gpu_runs_on_a_cpu(stage, tmp_path, capsys):
    options = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    gpu.main([stage, *options])
    found = json.loads((tmp_path / f"{stage}.json").read_text())
    assert found["rows"] and not any("error" in row for row in found["rows"]), found
    if stage == "parity":
        assert all(row["ok"] for row in found["rows"])
    gpu.main(["--tables", *options])
    assert f"## {stage}" in capsys.readouterr().out


def test_the_bars_are_those_of_the_page():
    text = bars.PAGE.read_text("utf-8")
    (_, float32), (_, bfloat16), (_, fused) = bars.groups(text)
    assert (len(float32), len(bfloat16), len(fused)) == (2 * 3, 2 * 2, 1)
    first = next(line for line in text.splitlines() if "likelihood" in line)
    assert first.startswith(
        "| likelihood | {0.time:.2f} ({0.low:.2f} to".format(float32["likelihood, small model"])
    )
    assert bfloat16["likelihood, small model"].memory is None
    one = bfloat16["spectrum control, IWSLT's size"]
    assert f"| {one.time:.2f}, {one.memory:.2f} |" in text
    with pytest.raises(ValueError, match="expected a ratio"):
        bars.ratio("1.01 each")


def test_no_row_is_begun_after_the_minutes(tmp_path):
    gpu.main(["speed", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--minutes", "0"])
    assert not list(tmp_path.iterdir())


def test_a_row_that_fails_is_kept_with_its_error(tmp_path):
    report = Report(tmp_path, "speed", minutes=1)
    assert report.add(lambda: {"ms": 1.0}, variant="first")
    assert report.add(lambda: {"ms": 1 / 0}, variant="second")
    first, second = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert first["ms"] == 1.0 and "ZeroDivisionError" in second["error"]


@pytest.mark.slow
def test_a_training_for_the_gpu_runs_on_a_cpu(tiny_translation_data, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_train, "SEEDS", (1,))
    methods = {"spectrum control": gpu_train.METHODS["spectrum control"]}
    monkeypatch.setattr(gpu_train, "METHODS", methods)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--device", "cpu", "--tiny", "--out", str(tmp_path), "--updates", "2"]
    gpu.main(["train", *options, "--data", str(tiny_translation_data)])
    (row,) = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert row["updates"] == 2 and row["valid_nll_loss"] > 0, row


def test_spectrum_decay(figures):
    found = figures(bench_spectrum_decay, "--shape", "tiny", "--device", "cpu", "--pairs", 1)
    for way in ("above", "both", "renewed"):
        assert {"time_ratio", "due_ratio"} <= set(found["results"]["tiny"][way])


@pytest.mark.slow
def test_consistency(figures):
    found = figures(bench_consistency, "--shape", "tiny", "--pairs", 1)
    assert [row["variant"] for row in found["results"]] == list(bench_consistency.VARIANTS)
    assert all("time_ratio" in row for row in found["results"])


@pytest.mark.slow
def test_allocator(figures, monkeypatch):
    monkeypatch.chdir(Path(harness.__file__).parents[1])
    flags = ("--shape", "tiny", "--steps", 1, "--pairs", 1)
    usual, kept = figures(bench_allocator, *flags)["results"]
    assert usual["seconds_ratio"] == 1 and {"seconds_ratio", "mib"} <= set(kept)


@pytest.mark.slow
def test_processes(figures, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(harness.__file__).parents[1])
    command = ["--shape", "tiny", "--pairs", 1, "--methods", "cosine", "--work-dir", tmp_path]
    plain, cosine = figures(bench_processes, *command)["results"]["tiny"]
    assert plain["seconds_ratio"] == 1 and cosine["turns"] == 1 and cosine["mib"] > 0

    def not_again(*_):
        raise AssertionError("a finished run was repeated")

    monkeypatch.setattr(bench_processes, "measure", not_again)
    assert figures(bench_processes, *command)["results"]["tiny"] == [plain, cosine]


@pytest.fixture
def processes(figures, monkeypatch, tmp_path):
    """Run the benchmark with runs that take no time; returns which ones were run."""
    found = {"seconds": [1.0], "processor_seconds": [1.0], "mib": 1.0}

    def run(*flags):
        ran = []
        monkeypatch.setattr(bench_processes, "measure", lambda argv, _: ran.append(argv) or found)
        command = ["--shape", "tiny", "--pairs", 1, "--methods", "cosine", *flags]
        figures(bench_processes, *command, "--work-dir", tmp_path / "work")
        return ran

    return run


def test_runs_of_other_conditions_are_not_taken_for_finished_ones(processes, monkeypatch):
    assert len(processes()) == 2 and not processes()
    before = bench_processes.conditions

    def changed(key):
        return lambda args: {**before(args), key: "another"}

    for key in ("threads", "torch", "processor", "commit", "ours", "kept"):
        monkeypatch.setattr(bench_processes, "conditions", changed(key))
        assert len(processes()) == 2 and not processes()


def test_a_run_whose_line_was_cut_off_is_repeated(processes, tmp_path):
    processes()
    record = tmp_path / "work" / "tiny-2.jsonl"
    record.write_text(record.read_text()[:-5])
    assert len(processes()) == 1 and not processes()
    assert [run["method"] for run in harness.whole_records(record)] == ["plain", "cosine"]


def test_data_whose_writing_was_stopped_are_written_anew(processes, tmp_path, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(bench_processes.torch, "randint", None)
        with pytest.raises(TypeError):
            processes()
    assert not list((tmp_path / "work").iterdir())
    processes()
    assert (tmp_path / "work" / "tiny-2" / "valid.de-en.en.idx").exists()


def test_threads_that_wait_are_not_counted_as_work(monkeypatch):
    """Of several threads those that wait are busy, so that the clock is read instead."""
    for threads, fewest, most in ((1, 0, 0.02), (2, 0.05, 60)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert fewest <= bench_products.timed(lambda: time.sleep(0.05)) < most


@pytest.mark.slow
def test_a_peer_trains_on_the_same_shape():
    pytest.importorskip("transformers")
    shape = bench_processes.SHAPES["tiny"]
    command = bench_processes.peer_command(Path(sys.executable), shape, "marian")
    assert {"--dim=32", "--ffn=64", "--layers=1", "--heads=4"} <= set(command)
    found = bench_processes.measure(command, keep_freed_memory=False)
    assert len(found["seconds"]) == shape.updates and found["mib"] > 0


def test_step(figures):
    found = figures(bench_step, "--shape", "tiny", "--device", "cpu", "--pairs", 1)
    assert "time_ratio" in found["results"]["tiny"]


def test_training(figures, monkeypatch, capsys):
    found = figures(bench_training, "--shape", "tiny", "--device", "cpu", "--pairs", 1)
    assert all("time_ratio" in found[part] for part in ("loss", "control"))
    monkeypatch.setattr(sys, "argv", "mod --memory fused_loss_ --shape tiny --device cpu".split())
    bench_training.main()
    assert float(capsys.readouterr().out) >= 0


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("keep_threads")
def test_losses_of_others_take_turns_with_ours(figures):
    """All of them are the same loss of the same output layer."""
    values = []
    for kind in bench_fused_loss.kinds():
        loss = bench_training.loss_of(kind, 61, 16, 7)
        loss().backward()
        values.append(loss())
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-6, atol=1e-6)
    found = figures(bench_fused_loss, "--quick", "--tokens", 8, "--seconds", 1)
    assert len(found["rows"]) == 2 * 2 * 2
    assert {"GPT-2", "Qwen"} == {row["vocabulary"] for row in found["rows"]}
    for row in found["rows"]:
        assert row["turns"] >= 2 and row["fused_loss_, s"] > 0 and row["over transformers"] > 0


@pytest.mark.usefixtures("keep_threads")
def test_what_by_products_of_the_loss_cost(figures, monkeypatch):
    monkeypatch.setattr(bench_by_products, "SIZES", dict(bench_by_products.SIZES))
    found = figures(bench_by_products, "--quick", "--turns", 1)
    forms = list(bench_by_products.FORMS)
    assert [row["form"] for row in found["rows"]] == [*forms, *forms]
    assert all(row["time"] == 1 for row in found["rows"] if row["form"] == "alone")


@pytest.mark.slow
def test_penalties(figures):
    rows = figures(bench_penalties, "--shape", "tiny", "--repetitions", 1)["rows"]
    assert {"plain", "cosine", "weight norm"} <= {row["penalty"] for row in rows}
    assert all("seconds" in row for row in rows)


@pytest.mark.slow
def test_penalties_stay_on_the_device_of_the_table():
    virtual = pytest.importorskip(
        "tests.cuda.virtual_cuda", reason="needs torch 2.2", exc_type=ImportError
    )
    with virtual.virtual_cuda():
        step = bench_penalties.PenalisedStep(bench_step.SHAPES["tiny"], "cuda", "fp32")
        step.run()
        for penalty in bench_penalties.PENALTIES.values():
            step.run(penalty)
            step.alone(penalty)
        assert virtual.on_gpu(step.table.grad)


@pytest.mark.slow
def test_mixture(figures, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_mixture, "DIMENSION", 8)
    monkeypatch.setattr(bench_mixture, "WORDS", 40)
    monkeypatch.setattr(bench_mixture, "TOKENS", 6)
    plot = tmp_path / "growth.png"
    found = figures(
        bench_mixture,
        *"--components 2 3 --words 30 --tokens 5 --repetitions 1".split(),
        "--plot",
        plot,
    )
    assert found["speedup_over_dense"] > 0 and plot.stat().st_size > 0


@pytest.mark.slow
def test_memory_is_measured_in_a_fresh_process(monkeypatch):
    monkeypatch.chdir(Path(harness.__file__).parents[1])
    arguments = ["--memory", "dense", "8", "20000", "64"]
    # Scores and probabilities of 64 x 8 x 20,000, 39 MiB each, and their gradients.
    assert harness.in_fresh_process("benchmarks.bench_mixture", arguments) > 100


def test_block_memory(figures, monkeypatch):
    flags = ("--words", 50, "--dim", 4, "--batches", 1)
    assert len(figures(bench_block_memory, *flags)["rows"]) == 5
    arguments = "mod --memory every-shape 2 50 4 1".split()
    monkeypatch.setattr(sys, "argv", arguments)
    bench_block_memory.main()


@pytest.mark.slow
def test_decoding(figures):
    flags = ("--components", 2, "--words", 50, "--dim", 16, "--repetitions", 1)
    assert len(figures(bench_decoding, *flags)["rows"]) == 3


def test_an_update_stands_beside_its_products(figures):
    torch.manual_seed(1)
    weight = torch.randn(7, 5, requires_grad=True)
    with bench_update.RecordedProducts() as products:
        torch.mm(torch.randn(3, 5), weight.t()).logsumexp(-1).sum().backward()
    # Of the forward pass, and of the gradient of the weight.
    assert [func.overloadpacket for func, *_ in products.calls] == [torch.ops.aten.mm] * 2
    products.again()()
    rows = figures(bench_update, "--shape", "tiny", "--turns", 1)["results"]["tiny"]
    assert [row["update"] for row in rows] == ["fairseq", "this package"]
    for row in rows:
        assert row["over its products"] > 1
        kinds = [row["Adam"], *(row[kind] for kind, _ in bench_update.KINDS)]
        assert all(share > 0 for share in kinds) and sum(kinds) == pytest.approx(1, abs=0.01)


def test_what_fills_up_a_batch_is_no_word():
    words = bench_step.vocabulary(9)
    tokens = torch.tensor([words.pad(), words.pad(), 5, 6, words.eos()])
    assert bench_ctranslate2.text_of(words, tokens) == f"{words[5]} {words[6]}"


def test_a_checkpoint_is_translated_by_fairseq_and_by_ctranslate2(
    figures, train, tiny_translation_data
):
    path = train("transformer", "cross_entropy") / "checkpoint_last.pt"
    rows = figures(bench_ctranslate2, path, tiny_translation_data, "--turns", 1, "--bf16")["rows"]
    assert [row["translated by"] for row in rows] == [
        *("bare fairseq", "with the plugin", "with the plugin, --bf16"),
        *("CTranslate2, float32", "CTranslate2, int8"),
    ]
    equal = [row["as bare fairseq"] for row in rows]
    # After four updates many words are nearly alike, and the two searches end by other rules.
    assert equal[0] == equal[1] == 1 and equal[3] > 0


@pytest.mark.parametrize("components", [0, 2])
def test_awd_lstm(figures, monkeypatch, components):
    sizes = (50, 8, 12, 8, components, 3, 5)
    monkeypatch.setitem(bench_awd_lstm.SHAPES, "sotu", sizes)
    found = figures(bench_awd_lstm, "--repetitions", 1)
    assert ("product_ratio" in found) == bool(components)


@pytest.mark.slow
def test_analysis(figures):
    found = figures(bench_analysis, "--rows", 300, "--dim", 8)
    assert (found["rows"], found["dim"]) == (300, 8)
