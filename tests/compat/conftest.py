import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from tests.compat.fairseq_process import FairseqProcess  # noqa: E402

SENTENCES = 100


@pytest.fixture(scope="session")
def bare(fork_server, tmp_path_factory):
    """fairseq as installed."""
    return FairseqProcess(fork_server, tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="session")
def patched(fork_server, tmp_path_factory):
    """fairseq after patch_fairseq()."""
    with fork_server.after("tests.compat.fairseq_process:patch") as server:
        yield FairseqProcess(server, tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="session")
def data(tmp_path_factory, patched):
    """Preprocessed translation data of 100 pairs, the same for every split."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    words = [f"w{i}" for i in range(20)]
    lines = [" ".join(rng.choices(words, k=rng.randint(2, 9))) for _ in range(SENTENCES)]
    for language in ("de", "en"):
        (folder / f"text.{language}").write_text("\n".join(lines) + "\n")
    text = str(folder / "text")
    prefixes = ["--trainpref", text, "--validpref", text, "--testpref", text]
    languages = ["-s", "de", "-t", "en"]
    destination = folder / "bin"
    patched.cli("fairseq_cli.preprocess", *languages, *prefixes, "--destdir", destination)
    return destination


@pytest.fixture
def copy(data, tmp_path):
    """A copy of the data, to be changed."""
    return Path(shutil.copytree(data, tmp_path / "copy"))


@pytest.fixture(params=["bare", "patched"])
def which(request):
    """The name of a process, for tests that do the same in both."""
    return request.param


@pytest.fixture
def process(which, request):
    """The process of that name."""
    return request.getfixturevalue(which)


TINY_MODEL = (
    "--arch transformer_tiny --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 8 "
    "--decoder-embed-dim 8 --encoder-ffn-embed-dim 8 --decoder-ffn-embed-dim 8 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2"
).split()


def train_arguments(data, save_dir, *more):
    """Arguments of fairseq-train for a model that trains in a second."""
    fixed = "--cpu --optimizer adam --lr 1e-3 --batch-size 10 --num-workers 0 --log-format simple"
    return [str(data), "--save-dir", str(save_dir), *TINY_MODEL, *fixed.split(), *more]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, patched, data):
    """A checkpoint of a legacy arch, trained for an epoch."""
    folder = tmp_path_factory.mktemp("checkpoints")
    patched.cli("fairseq_cli.train", *train_arguments(data, folder, "--max-epoch", "1"))
    return folder / "checkpoint_last.pt"
