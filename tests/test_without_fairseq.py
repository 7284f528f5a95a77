"""The library part of the package works where fairseq is not installed, nor any extra."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spectral_fairseq
from tests.new_process import HOME, run_commands, without

IMPORT_ALL = """
import importlib, pkgutil

def import_all(name):
    package = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(package, "__path__", [])):
        import_all(f"{name}.{found.name}")

FLOORS = "errors files provenance functional methods embeddings heads lm"
PACKAGES = "checkpoints formats analysis compat training"
for package in [*FLOORS.split(), *PACKAGES.split()]:
    import_all(f"spectral_fairseq.{package}")
"""


@pytest.mark.slow
def test_the_library_is_imported_without_fairseq():
    """Nor does a function of it import fairseq: tests/test_architecture.py."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            without("fairseq", "fairseq_cli", "hydra", "omegaconf") + IMPORT_ALL,
        ],
        env={**os.environ, "PYTHONPATH": HOME},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# What the extras bring, under the names of the imports.
EXTRAS = (
    *("fairseq", "fairseq_cli", "hydra", "omegaconf", "sacrebleu", "scipy", "jinja2", "matplotlib"),
    *("pandas", "safetensors", "sentencepiece", "transformers", "tokenizers", "accelerate"),
    *("lightning", "ctranslate2", "sacremoses"),
)

TORCH_ALONE = without(*EXTRAS) + "import spectral_fairseq.training"


@pytest.mark.slow
def test_a_plain_installation_analyses_and_names_the_extra_that_it_lacks(tmp_path):
    import numpy
    import torch

    numpy.save(tmp_path / "table.npy", torch.randn(300, 8).numpy())
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    torch.save({"model": {"decoder.embed_tokens.weight": torch.randn(30, 8)}}, tmp_path / "one.pt")
    (tmp_path / "nbest").write_text("T-0\ta\nH-0\t-1\ta\n")
    works = (("analyze", "table.npy"), ("compare", "table.npy", "one.pt"))
    lacks = (
        ("models", "analyze", "model.safetensors"),
        ("plots", "analyze", "table.npy", "--out", "report"),
        ("predictions", "analyze", "one.pt", "--nbest", "nbest"),
        ("fairseq", "analyze", "one.pt", "--data", "."),
        ("fairseq", "export", "one.pt", "plain.pt"),
        ("fairseq", "flags"),
    )
    commands = (*works, *(argv for _, *argv in lacks))
    analysed, compared, *refused = run_commands(commands, tmp_path, TORCH_ALONE)
    assert analysed.returncode == 0 and "random" in analysed.stdout, analysed.stderr
    assert compared.returncode == 0, compared.stderr
    for (extra, *argv), done in zip(lacks, refused):
        assert done.returncode == 2, (argv, done.stdout, done.stderr)
        assert f'pip install ".[{extra}]"' in done.stderr, done.stderr


def test_an_extra_that_a_message_names_exists():
    setup = Path(spectral_fairseq.__file__).parents[1] / "setup.py"
    if not setup.exists():
        pytest.skip("needs the source tree")
    known = set(re.findall(r'^ +"(\w+)": \[', setup.read_text("utf-8"), re.MULTILINE))
    named = set()
    for file in Path(spectral_fairseq.__file__).parent.rglob("*.py"):
        text = file.read_text("utf-8")
        named |= set(re.findall(r'needs_extra\(\s*"(\w+)"', text))
        named |= set(re.findall(r"\.\[(\w+)\]", text))
    assert {"plots", "models", "export", "predictions", "fairseq"} <= named <= known
