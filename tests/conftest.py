"""Fixtures that train and evaluate through the real command line, on data of a few kilobytes.

Importing fairseq takes most of the time of such a run, so every result is kept for the whole
session: ask for the same training twice and it is run once.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

import spectral_fairseq

PACKAGE = Path(spectral_fairseq.__file__).resolve().parent

MODULES = {
    "fairseq-preprocess": "fairseq_cli.preprocess",
    "fairseq-train": "fairseq_cli.train",
    "fairseq-hydra-train": "fairseq_cli.hydra_train",
    "fairseq-generate": "fairseq_cli.generate",
    "fairseq-interactive": "fairseq_cli.interactive",
    "fairseq-validate": "fairseq_cli.validate",
    "fairseq-eval-lm": "fairseq_cli.eval_lm",
    "fairseq-score": "fairseq_cli.score",
    "spectral-fairseq": "spectral_fairseq.cli.main",
}

# Sizes for fairseq's Transformers; d = 16 is below N, as an SVD table needs.
TINY_TRANSLATION = (
    *("--encoder-embed-dim", "16", "--decoder-embed-dim", "16"),
    *("--encoder-ffn-embed-dim", "24", "--decoder-ffn-embed-dim", "24"),
    *("--encoder-layers", "1", "--decoder-layers", "1"),
    *("--encoder-attention-heads", "2", "--decoder-attention-heads", "2"),
)
TINY_LANGUAGE_MODEL = (
    *("--decoder-embed-dim", "16", "--decoder-input-dim", "16", "--decoder-output-dim", "16"),
    *("--decoder-ffn-embed-dim", "24", "--decoder-layers", "1", "--decoder-attention-heads", "2"),
)


def _sentences(count: int, words: List[str], seed: int) -> List[List[str]]:
    generator = random.Random(seed)
    return [generator.choices(words, k=generator.randint(2, 9)) for _ in range(count)]


def _write(path: Path, sentences: List[List[str]]) -> None:
    path.write_text("".join(" ".join(words) + "\n" for words in sentences), "utf-8")


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one command line in a process of its own.

    ``run_cli("fairseq-train", DATA, "--arch", ..., cwd=FOLDER, rc=0)``: arguments become
    strings, and an exit status other than ``rc`` fails the test with the command's output;
    ``rc=None`` takes any.
    """

    def run(*argv: Any, cwd: Any = None, rc: Any = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", MODULES[argv[0]], *map(str, argv[1:])]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH")))
        )
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        if rc is not None and done.returncode != rc:
            pytest.fail(
                f"{' '.join(map(str, argv))}\nexit status {done.returncode}, not {rc}\n"
                f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            )
        return done

    return run


@pytest.fixture(scope="session")
def tiny_translation_data(tmp_path_factory: Any, run_cli: Any) -> Path:
    """A binarised parallel corpus, de -> en, with a joined dictionary of about 50 types.

    The target is the source with every word renamed; 7 test sentences are deliberately no
    multiple of 8. The text lies beside the binary data, as ``train.de`` and so on.
    """
    folder = tmp_path_factory.mktemp("translation")
    words = [f"w{index}" for index in range(20)]
    for seed, (split, count) in enumerate((("train", 48), ("valid", 11), ("test", 7))):
        source = _sentences(count, words, seed)
        _write(folder / f"{split}.de", source)
        _write(folder / f"{split}.en", [[word.upper() for word in line] for line in source])
    run_cli(
        *("fairseq-preprocess", "--source-lang", "de", "--target-lang", "en"),
        *("--trainpref", folder / "train", "--validpref", folder / "valid"),
        *("--testpref", folder / "test", "--destdir", folder / "bin", "--joined-dictionary"),
    )
    for text in folder.glob("*.??"):
        text.rename(folder / "bin" / text.name)
    return folder / "bin"


@pytest.fixture(scope="session")
def tiny_lm_data(tmp_path_factory: Any, run_cli: Any) -> Path:
    """A binarised monolingual corpus of about 40 types, with its text as ``train.txt``..."""
    folder = tmp_path_factory.mktemp("language_model")
    words = [f"w{index}" for index in range(36)]
    for seed, (split, count) in enumerate((("train", 60), ("valid", 13), ("test", 9))):
        _write(folder / f"{split}.txt", _sentences(count, words, seed))
    run_cli(
        *("fairseq-preprocess", "--only-source", "--destdir", folder / "bin"),
        *("--trainpref", folder / "train.txt", "--validpref", folder / "valid.txt"),
        *("--testpref", folder / "test.txt"),
    )
    for text in folder.glob("*.txt"):
        text.rename(folder / "bin" / text.name)
    return folder / "bin"


@pytest.fixture(scope="session")
def train(tmp_path_factory: Any, request: Any, run_cli: Any) -> Callable[..., Path]:
    """Train a tiny model for a few updates: ``train(arch, criterion, *more) -> save folder``.

    The corpus, the task and (for Transformers) the sizes follow from the arch; ``more`` comes
    last on the command line and so overrides them. One epoch is 4 updates unless ``more`` says
    otherwise; the folder holds ``checkpoint_last.pt``, ``checkpoint_best.pt`` and ``log.txt``.
    """
    kept: Dict[Tuple[str, ...], Path] = {}

    def run(arch: str, criterion: str, *more: Any) -> Path:
        key = (arch, criterion, *map(str, more))
        if key in kept:
            return kept[key]
        is_lm = any(part in arch for part in ("_lm", "awd_", "_xl"))
        data = request.getfixturevalue("tiny_lm_data" if is_lm else "tiny_translation_data")
        options: Tuple[Any, ...]
        if is_lm:
            options = ("--task", "language_modeling", "--tokens-per-sample", "16")
        else:
            options = ("--task", "translation", "--source-lang", "de", "--target-lang", "en")
        if arch.startswith("transformer") and "_xl" not in arch:
            options += TINY_LANGUAGE_MODEL if is_lm else TINY_TRANSLATION
        folder = tmp_path_factory.mktemp(arch)
        done = run_cli(
            *("fairseq-train", data, "--user-dir", PACKAGE, "--save-dir", folder / "checkpoints"),
            *("--arch", arch, "--criterion", criterion, *options),
            *("--optimizer", "adam", "--lr", "0.005", "--max-tokens", "96", "--seed", "1"),
            *("--max-epoch", "1", "--max-update", "4", "--num-workers", "0"),
            *("--data-buffer-size", "0", "--log-format", "simple", "--log-interval", "1"),
            *more,
            cwd=folder,
        )
        (folder / "checkpoints" / "log.txt").write_text(done.stdout + done.stderr, "utf-8")
        kept[key] = folder / "checkpoints"
        return kept[key]

    return run
