"""Workers that torchrun and SLURM start, that die, and that become more or fewer."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.functional.float32_products import choose_products
from tests.conftest import PACKAGE, Command, train_command
from tests.plugin.test_command_line import USER_DIR, hydra_command
from tests.plugin.test_same_training import weights_of
from tests.slurm import write_slurm

if shutil.which("bash") is None:
    pytest.skip("no bash", allow_module_level=True)

# Four updates of eight sentences, which is an epoch of the tiny data, with a stop in the middle.
TRAINING = (
    *("--share-all-embeddings", "--spectrum-weight", "0.1", "--orthogonality-weights", "1,1,0,0"),
    *("--optimizer", "sgd", "--lr", "0.1", "--dropout", "0", "--max-tokens", "1000"),
    *("--batch-size", "6", "--max-update", "4", "--save-interval-updates", "2"),
)
HALF = "checkpoint_1_2.pt"
# What docs/clusters.md adds on machines without GPUs.
ON_CPUS = ("--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
# The second worker dies before its third update, once.
DYING = """
import os
import signal

from fairseq.trainer import Trainer

import {package}.plugin

take_step = Trainer.train_step

def take_step_or_die(self, *args, **kwargs):
    third = self.get_num_updates() == 2
    if third and os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10":
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(self, *args, **kwargs)

Trainer.train_step = take_step_or_die
"""


@pytest.fixture(scope="module")
def one_worker(train):
    """Folder of a training by one worker with two batches per update."""
    return train("transformer_sc", "spectrum_control", *TRAINING, "--update-freq", "2")


@pytest.fixture(scope="module")
def launch(tmp_path_factory, fork_server, tiny_translation_data):
    """Start a training by a launcher's command line, as docs/clusters.md writes it."""
    programs = tmp_path_factory.mktemp("programs")
    fork_server.write_programs(programs / "bin")
    write_slurm(programs / "bin")
    env = fork_server.environment()
    env["PATH"] = f"{programs / 'bin'}{os.pathsep}{env['PATH']}"
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def run(launcher, folder, *more, recipe=None):
        recipe = recipe or (tiny_translation_data, "transformer_sc", "spectrum_control", *TRAINING)
        data, *flags = recipe
        _, *command = train_command(data, folder, *flags, *ON_CPUS, *more)
        argv = (*launcher, programs / "bin" / "fairseq-train", *command)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            done = subprocess.run([*map(str, argv)], env=env, stdout=log, stderr=log)
            log.seek(0)
            printed = log.read()
        assert done.returncode == 0, printed[-6000:]
        return printed

    return run


@pytest.fixture(scope="module")
def restarted(tmp_path_factory, launch):
    """Folder of a training by two workers of torchrun, one of which dies half way."""
    folder = tmp_path_factory.mktemp("restarted")
    (folder / "dying").mkdir()
    (folder / "dying" / "__init__.py").write_text(DYING.format(package=PACKAGE.name), "utf-8")
    printed = launch((*TORCHRUN, "--max_restarts", "1"), folder, "--user-dir", folder / "dying")
    assert f"Loaded checkpoint {folder / 'checkpoint_last.pt'} (epoch 1 @ 2 updates)" in printed
    return folder


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def assert_same_training(first, second):
    one, two = (weights_of(folder) for folder in (first, second))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-6)
    half = weights_of(first / HALF)
    assert any((half[key] - one[key]).abs().max() > 1e-3 for key in one)


def test_torchrun_restarts_workers_where_one_died(restarted, one_worker):
    assert_same_training(one_worker, restarted)


def test_one_worker_goes_on_for_two(restarted, one_worker, train):
    more = ("--update-freq", "2", "--restore-file", restarted / HALF)
    assert_same_training(one_worker, train("transformer_sc", "spectrum_control", *TRAINING, *more))


def test_two_workers_of_slurm_go_on_for_one(one_worker, launch, tmp_path):
    shutil.copy(one_worker / HALF, tmp_path)
    printed = launch(
        *(("srun", "--ntasks", "2"), tmp_path, "--restore-file", one_worker / HALF),
        *("--distributed-world-size", "2", "--distributed-port", free_port()),
    )
    assert "(epoch 1 @ 2 updates)" in printed and "as rank 1" in printed
    assert_same_training(one_worker, tmp_path)


def test_two_workers_of_torch_s_own_data_parallelism(one_worker, launch, tmp_path):
    """``--ddp-backend pytorch_ddp`` asked for a GPU."""
    launch(TORCHRUN, tmp_path, "--ddp-backend", "pytorch_ddp")
    assert_same_training(one_worker, tmp_path)


def test_hydra_refuses_workers_that_train_alone_and_takes_its_remedy(
    fork_server, tiny_translation_data, tmp_path
):
    """It numbers its workers before it loads the plugin."""
    saved = tmp_path / "saved"
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}

    def start(rank, *more):
        argv = (*hydra_command(tiny_translation_data, saved), f"hydra.run.dir={rank}", *more)
        env = {**common, "TORCHELASTIC_RUN_ID": "tests", "RANK": rank, "LOCAL_RANK": rank}
        return Command(fork_server, argv, env=env, cwd=tmp_path)

    refused = start("0").finish(1).stderr
    assert "ConfigurationError" in refused and not [*saved.iterdir()]
    remedy = re.findall(r"distributed_training\.\w+=[^\s.]+", refused)
    assert len(remedy) == 5
    one, two = (start(rank, *remedy) for rank in "01")
    printed = [worker.finish().stdout for worker in (one, two)]
    assert "training on 2 devices" in printed[0] and "Saving checkpoint" in printed[0]
    assert "Saving checkpoint" not in printed[1]


def spawned():
    """Flags with which fairseq starts its worker itself, as it does on every GPU that it sees."""
    address = f"tcp://localhost:{free_port()}"
    return (
        *("--distributed-init-method", address, "--distributed-world-size", "1"),
        *("--distributed-rank", "0", "--distributed-backend", "gloo"),
    )


def test_a_worker_that_fairseq_starts_multiplies_as_the_flag_says(launch, tmp_path):
    other = "torch" if choose_products().fast else "fast"
    printed = launch((), tmp_path, *spawned(), "--float32-products", other)
    assert printed.count("float32 products are computed") == 1
    kept = load_checkpoint(tmp_path / "checkpoint_last.pt")["extra_state"]["float32_products"]
    assert kept["fast"] is (other == "fast")


def test_a_worker_that_fairseq_starts_evaluates_in_bfloat16(
    one_worker, run_cli, tiny_translation_data
):
    def validated(*more):
        path = one_worker / "checkpoint_last.pt"
        done = run_cli(
            *("fairseq-validate", tiny_translation_data, "--path", path, *USER_DIR, "--cpu"),
            *("--task", "translation", "--batch-size", "5", "--log-format", "json", *more),
        )
        (found,) = re.findall(r'"valid_loss": (.*?), "valid_wps"', done.stdout + done.stderr)
        return found

    full, half, apart = validated(), validated("--bf16"), validated("--bf16", *spawned())
    assert half == apart != full
