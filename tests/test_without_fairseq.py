"""The library part of the package works where fairseq is not installed, nor any extra."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import spectral_fairseq
from tests.new_process import run_commands

WITHOUT_FAIRSEQ = """
    import importlib, pkgutil, sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("fairseq", "fairseq_cli", "hydra", "omegaconf"):
                raise ImportError(f"{name} is not installed")

    sys.meta_path.insert(0, Absent())

    import spectral_fairseq

    def import_all(name):
        package = importlib.import_module(name)
        for found in pkgutil.iter_modules(getattr(package, "__path__", [])):
            import_all(f"{name}.{found.name}")

    PACKAGES = "errors files provenance functional embeddings heads lm checkpoints analysis compat"
    for package in ["training", *PACKAGES.split()]:
        import_all(f"spectral_fairseq.{package}")
"""

TRAINING = """
    import torch
    from spectral_fairseq.checkpoints.reading import load_checkpoint
    from spectral_fairseq.embeddings.svd import SVDEmbedding
    from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
    from spectral_fairseq.functional.row_penalties import cosine_penalty
    from spectral_fairseq.functional.spectrum_penalties import spectrum_penalty

    torch.manual_seed(0)
    table = SVDEmbedding(50, 8, padding_idx=1)
    network = torch.nn.GRU(8, 8, batch_first=True)
    parameters = [*table.parameters(), *network.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    tokens = torch.arange(4, 40).view(3, 12)  # [sentences, tokens]
    losses = []
    for _ in range(30):
        hidden, _ = network(table(tokens[:, :-1]))
        contexts, matrix = table.operands(hidden.flatten(0, 1))  # [tokens, d], [N, d]
        loss, *_ = blockwise_cross_entropy(contexts, tokens[:, 1:].flatten(), matrix)
        penalty = spectrum_penalty(table.singular_values(), table.prior())
        (loss + penalty + cosine_penalty(table.weight)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses

    torch.save({"model": table.state_dict()}, sys.argv[1])
    model = load_checkpoint(sys.argv[1])["model"]
    assert torch.equal(model["U"], table.U)
    absent = ("fairseq", "fairseq_cli", "hydra", "omegaconf")
    assert not any(name.split(".")[0] in absent for name in sys.modules)
"""


@pytest.mark.slow
def test_a_plain_torch_training_loop(tmp_path):
    home = str(Path(spectral_fairseq.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_FAIRSEQ + TRAINING), tmp_path / "table.pt"],
        env={**os.environ, "PYTHONPATH": home},
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


TORCH_ALONE = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import spectral_fairseq.training
"""


@pytest.mark.slow
def test_a_plain_installation_analyses_and_names_the_extra_that_it_lacks(tmp_path):
    import numpy
    import torch

    numpy.save(tmp_path / "table.npy", torch.randn(300, 8).numpy())
    (tmp_path / "model.safetensors").write_bytes(bytes(64))
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
        assert f'pip install "spectral-fairseq[{extra}]"' in done.stderr, done.stderr


def test_an_extra_that_a_message_names_exists():
    setup = Path(spectral_fairseq.__file__).parents[1] / "setup.py"
    if not setup.exists():
        pytest.skip("needs the source tree")
    known = set(re.findall(r'^ +"(\w+)": \[', setup.read_text("utf-8"), re.MULTILINE))
    named = set()
    for file in Path(spectral_fairseq.__file__).parent.rglob("*.py"):
        text = file.read_text("utf-8")
        named |= set(re.findall(r'needs_extra\(\s*"(\w+)"', text))
        named |= set(re.findall(r"spectral-fairseq\[(\w+)\]", text))
    assert {"plots", "models", "export", "predictions", "fairseq"} <= named <= known
