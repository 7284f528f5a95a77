"""Texts of which the model can read nothing."""

from tests.compat.fairseq_process import Fails


def pieces(folder, flags, positions, context=0):
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_eval_lm_parser()
    args = options.parse_args_and_arch(parser, [folder, "--path", "x", *flags])
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    return len(
        task.eval_lm_dataloader(
            dataset=dataset, max_tokens=600, max_positions=positions, context_window=context
        )
    )


def skipping(folder, positions, split="valid"):
    """The batches of sentences by a task of translation that skips long ones."""
    import numpy as np
    import torch
    from fairseq.data import Dictionary, LanguagePairDataset
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    words = Dictionary.load(f"{folder}/dict.de.txt")
    task = TranslationTask(TranslationConfig(), words, words)
    lines = [torch.full((length,), 5) for length in (4, 6)]
    dataset = LanguagePairDataset(lines, np.array([4, 6]), words)
    if split is not None:  # else the lines of a running translation
        task.datasets[split] = dataset
    batches = task.get_batch_iterator(
        dataset, max_positions=positions, max_sentences=1, ignore_invalid_inputs=True
    )
    return len(batches)


def test_sentences_that_are_all_skipped(bare, patched, data):
    for sides, batches in ((bare, {3: 0, 5: 1, 8: 2}), (patched, {5: 1, 8: 2})):
        for positions, count in batches.items():
            sides.gives(count, skipping, folder=str(data), positions=positions)
    refused = Fails(r"2, all skipped, such as one of [0-9(), ]+ tokens; .* reads 3. .*sentences")
    patched.gives(refused, skipping, folder=str(data), positions=3)


def test_lines_of_a_running_translation_are_skipped(patched, data):
    """One that is too long ends neither fairseq-interactive nor the hub."""
    patched.gives(0, skipping, folder=str(data), positions=3, split=None)


def test_a_text_of_which_every_piece_is_skipped(bare, patched, tmp_path):
    (tmp_path / "text").write_text(" ".join(f"w{i % 20}" for i in range(511)) + "\n", "utf-8")
    pref = str(tmp_path / "text")
    arguments = ["--only-source", "--trainpref", pref, "--validpref", pref]
    patched.cli("fairseq_cli.preprocess", *arguments, "--destdir", tmp_path / "bin")
    text = {"folder": str(tmp_path / "bin"), "positions": 256}
    bare.gives(0, pieces, flags=[], **text)
    refused = Fails("1, all skipped, such as one of 512 tokens.*reads 256.*per-sample")
    patched.gives(refused, pieces, flags=[], **text)
    fitting = {"flags": ["--tokens-per-sample", "64"], **text}
    assert patched.call(pieces, **fitting) > 0
    assert patched.call(pieces, context=16, **fitting) > 0
