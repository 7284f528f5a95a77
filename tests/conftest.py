"""Fixtures that train and evaluate through the real command line, on data of a few kilobytes.

Command lines run in forks of a process that has imported fairseq (:mod:`tests.fork_server`), and
every training is kept for the whole session: ask for the same one twice, in this process or in
another of xdist's, and it is run once. Nothing may write into the folders of what is kept.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence

import pytest
import setuptools  # noqa: F401  (before distutils, or torch.compile refuses Python's own copy)
from filelock import FileLock

import spectral_fairseq
from tests.fork_server import ForkServer

NO_FAIRSEQ = "fairseq is not installed"


class _SkipWithoutFairseq:
    """Skips what imports fairseq or what comes with it, a file of tests or a single one.

    What only asks whether fairseq is there is told that it is not.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        asks = sys._getframe(2).f_code is importlib.util.find_spec.__code__
        if name.split(".")[0] in ("fairseq", "fairseq_cli", "hydra", "omegaconf") and not asks:
            pytest.skip(NO_FAIRSEQ, allow_module_level=True)


HAS_FAIRSEQ = importlib.util.find_spec("fairseq") is not None
if not HAS_FAIRSEQ:
    sys.meta_path.append(_SkipWithoutFairseq())  # last: asked for what no other finds

PACKAGE = Path(spectral_fairseq.__file__).resolve().parent
ROOT = Path(__file__).resolve().parents[1]

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


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Mark every test that runs a command line, or trains through one, as slow.

    Files with slow tests come first: the last one, with which one of xdist's workers is busy while
    the others are done, should be short.
    """
    for item in items:
        if "fork_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what is imported out of every collection of garbage, now and later.

    It is millions of objects, through which the imports would go again and again, and later each
    test of Trainer and each search for the owners of a table, a second each time.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _what_other_files_left() -> None:
    """Leave what earlier files have imported and kept out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The process in whose forks command lines run; started for the first of them."""
    if not HAS_FAIRSEQ:
        pytest.skip(NO_FAIRSEQ)
    with tempfile.TemporaryDirectory() as folder:  # pytest's names are too long for a socket
        with ForkServer.started(Path(folder), [str(PACKAGE.parent), str(ROOT)]) as server:
            yield server


@pytest.fixture(scope="session")
def plugin_server(fork_server: ForkServer) -> Iterator[ForkServer]:
    """The same after ``--user-dir spectral_fairseq``."""
    with fork_server.after("tests.fork_server:import_plugin") as server:
        yield server


class Command:
    """A command line that runs in a fork of the server; its output goes to files.

    Args:
        server: the server.
        argv: program and arguments, which become strings.
        function: the function of :mod:`tests.fork_server` that becomes the program.
        options: see :meth:`ForkServer.start`.
    """

    def __init__(
        self,
        server: ForkServer,
        argv: Sequence[Any],
        function: str = "run_program",
        **options: Any,
    ) -> None:
        self.argv = [str(argument) for argument in argv]
        self._streams = [open(os.devnull), tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        numbers = [stream.fileno() for stream in self._streams]
        call = f"tests.fork_server:{function}"
        self._running = server.start(call, self.argv, streams=numbers, **options)

    def finish(self, rc: Optional[int] = 0) -> subprocess.CompletedProcess[str]:
        """Wait for the end; an exit status other than ``rc`` fails the test, None takes any."""
        status = self._running.wait()
        printed = []
        for stream in self._streams[1:]:
            stream.seek(0)
            printed.append(stream.read().decode("utf-8", "replace"))
        for stream in self._streams:
            stream.close()
        if rc is not None and status != rc:
            pytest.fail(
                f"{' '.join(self.argv)}\nexit status {status}, not {rc}\n"
                f"{printed[0][-3000:]}\n{printed[1][-6000:]}"
            )
        return subprocess.CompletedProcess(self.argv, status, *printed)


@pytest.fixture(scope="session")
def run_cli(
    fork_server: ForkServer, plugin_server: ForkServer
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one command line in a process of its own, a fork of a server.

    One that imports this package anyway is a fork of :func:`plugin_server`.

    ``run_cli("fairseq-train", DATA, "--arch", ..., cwd=FOLDER, rc=0)``: arguments become
    strings, and an exit status other than ``rc`` fails the test with the command's output;
    ``rc=None`` takes any.
    """

    def run(*argv: Any, cwd: Any = None, rc: Any = 0) -> subprocess.CompletedProcess[str]:
        if argv[0] == "spectral-fairseq" or PACKAGE in argv:
            return Command(plugin_server, argv, cwd=cwd).finish(rc)
        return Command(fork_server, argv, cwd=cwd).finish(rc)

    return run


@pytest.fixture(scope="session")
def run_without_plugin(fork_server: ForkServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same for a program of fairseq that must never import this package."""

    def run(*argv: Any, cwd: Any) -> subprocess.CompletedProcess[str]:
        return Command(fork_server, argv, "run_without_plugin", cwd=cwd).finish()

    return run


@pytest.fixture(scope="session")
def run_on_two_workers(plugin_server: ForkServer) -> Callable[..., str]:
    """Run a :func:`train_command` as two data-parallel workers on the CPU; returns what they print.

    The environment is that of torchrun, and the flags are those of docs/clusters.md.
    """

    def run(*argv: Any) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        common["TORCHELASTIC_RUN_ID"] = "tests"
        flags = ("--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")
        workers = [
            Command(
                plugin_server,
                (*argv, *flags),
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        done = [worker.finish() for worker in workers]
        return "".join(one.stdout + one.stderr for one in done)

    return run


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: Any) -> Callable[..., Path]:
    """Make a folder once for all of xdist's workers: ``made_once(name, key, make) -> folder``.

    ``make(folder)`` fills an empty folder whose name follows from ``name`` and ``key``.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, key: Sequence[str], make: Callable[[Path], None]) -> Path:
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:12]
        folder = shared / "made" / f"{name}-{digest}"
        made = folder.with_suffix(".made")
        folder.parent.mkdir(exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a failure
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def tiny_translation_data(made_once: Any, run_cli: Any) -> Path:
    """A binarised parallel corpus, de -> en, with a joined dictionary of about 50 types.

    The target is the source with every word renamed; 7 test sentences are deliberately no
    multiple of 8. The text lies beside the binary data, as ``train.de`` and so on.
    """
    words = [f"w{index}" for index in range(20)]

    def make(folder: Path) -> None:
        for seed, (split, count) in enumerate((("train", 48), ("valid", 11), ("test", 7))):
            source = _sentences(count, words, seed)
            _write(folder / f"{split}.de", source)
            _write(folder / f"{split}.en", [[word.upper() for word in line] for line in source])
        run_cli(
            *("fairseq-preprocess", "--source-lang", "de", "--target-lang", "en"),
            *("--trainpref", folder / "train", "--validpref", folder / "valid"),
            *("--testpref", folder / "test", "--destdir", folder, "--joined-dictionary"),
        )

    return made_once("translation", (), make)


@pytest.fixture(scope="session")
def tiny_lm_data(made_once: Any, run_cli: Any) -> Path:
    """A binarised monolingual corpus of about 40 types, with its text as ``train.txt``..."""
    words = [f"w{index}" for index in range(36)]

    def make(folder: Path) -> None:
        for seed, (split, count) in enumerate((("train", 60), ("valid", 13), ("test", 9))):
            _write(folder / f"{split}.txt", _sentences(count, words, seed))
        run_cli(
            *("fairseq-preprocess", "--only-source", "--destdir", folder),
            *("--trainpref", folder / "train.txt", "--validpref", folder / "valid.txt"),
            *("--testpref", folder / "test.txt"),
        )

    return made_once("language_model", (), make)


def is_language_model(arch: str) -> bool:
    return any(part in arch for part in ("_lm", "awd_", "_xl"))


def train_command(data: Path, folder: Path, arch: str, criterion: str, *more: Any) -> List[Any]:
    """The command line of a training of an epoch of four updates; what ``more`` says last holds."""
    if is_language_model(arch):
        options = ["--task", "language_modeling", "--tokens-per-sample", "16"]
    else:
        options = ["--task", "translation", "--source-lang", "de", "--target-lang", "en"]
    if arch.startswith("transformer") and "_xl" not in arch:
        options += TINY_LANGUAGE_MODEL if is_language_model(arch) else TINY_TRANSLATION
    return [
        *("fairseq-train", data, "--user-dir", PACKAGE, "--save-dir", folder),
        *("--arch", arch, "--criterion", criterion, *options),
        *("--optimizer", "adam", "--lr", "0.005", "--max-tokens", "96", "--seed", "1"),
        *("--max-epoch", "1", "--max-update", "4", "--num-workers", "0"),
        *("--data-buffer-size", "0", "--log-format", "simple", "--log-interval", "1"),
        *more,
    ]


@pytest.fixture(scope="session")
def train(made_once: Any, request: Any, run_cli: Any) -> Callable[..., Path]:
    """Train a tiny model for a few updates: ``train(arch, criterion, *more) -> save folder``.

    The corpus, the task and (for Transformers) the sizes follow from the arch; ``more`` comes
    last on the command line and so overrides them. One epoch is 4 updates unless ``more`` says
    otherwise; the folder holds ``checkpoint_last.pt``, ``checkpoint_best.pt`` and ``log.txt``.
    """

    def run(arch: str, criterion: str, *more: Any) -> Path:
        data = request.getfixturevalue(
            "tiny_lm_data" if is_language_model(arch) else "tiny_translation_data"
        )

        def make(folder: Path) -> None:
            done = run_cli(*train_command(data, folder, arch, criterion, *more), cwd=folder)
            (folder / "log.txt").write_text(done.stdout + done.stderr, "utf-8")

        return made_once(arch, (criterion, *map(str, more)), make)

    return run


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The package of this name, or a skipped test where it is missing or wants another torch."""
    from spectral_fairseq.errors import ConfigurationError
    from spectral_fairseq.provenance import import_transformers

    try:
        package = import_transformers()
    except ConfigurationError as error:
        pytest.skip(str(error))
    gc.freeze()  # as after the collection of tests
    return package


@pytest.fixture()
def mesh():
    """Two devices of which this process is one; nobody answers for the other."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield distributed.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def products_as_torch_comes(monkeypatch):
    """Float32 products and attention as torch has them, whatever an earlier trainer has chosen."""
    import torch
    from torch.nn import functional

    from spectral_fairseq.functional import float32_products

    monkeypatch.setattr(float32_products, "_in_force", {})
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):
        matmul = None
    attention = getattr(functional, "scaled_dot_product_attention", None)
    flash = getattr(torch.backends.cuda, "flash_sdp_enabled", lambda: None)()
    precision = None if matmul is None else matmul.fp32_precision
    if attention is not None:
        functional.scaled_dot_product_attention = getattr(attention, "__wrapped__", attention)
        torch.backends.cuda.enable_flash_sdp(True)
    if matmul is not None:
        matmul.fp32_precision = "none"
    yield
    if attention is not None:
        functional.scaled_dot_product_attention = attention
        torch.backends.cuda.enable_flash_sdp(flash)
    if matmul is not None:
        matmul.fp32_precision = precision
