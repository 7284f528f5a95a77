"""Patches for what fairseq runs on: current torch and numpy, CPUs, and their launchers.

tests/plugin/test_workers.py trains with several workers.
"""

import importlib.util
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from spectral_fairseq.compat.machines import ENCODER_FAST_PATH, JOBLIB_WORKERS, balanced_assignment
from spectral_fairseq.errors import ConfigurationError
from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Fails, Failure
from tests.slurm import write_slurm

# Names that numpy has retired


def sentences_as_blocks():
    """--sample-break-mode eos."""
    import torch
    from fairseq.data import TokenBlockDataset

    tokens = [torch.tensor([5, 6, 2]), torch.tensor([7, 2]), torch.tensor([8, 9, 10, 2])]
    blocks = TokenBlockDataset(tokens, [3, 2, 4], None, pad=1, eos=2, break_mode="eos")
    return [block.tolist() for block in blocks]


def bucketed_lengths():
    """--num-batch-buckets: percentiles of the lengths, then a token count for each pair."""
    import torch
    from fairseq.data import Dictionary, LanguagePairDataset, ListDataset

    words = Dictionary()
    words.add_symbol("w")
    sizes = [1, 2, 3, 4, 9]
    sentences = ListDataset([torch.full((n,), 4) for n in sizes], sizes)
    pairs = LanguagePairDataset(
        sentences, sentences.sizes, words, sentences, sentences.sizes, words, num_buckets=2
    )
    return [int(n) for n in pairs.bucketed_num_tokens]


def counts_of_spans():
    """Masking without overlap counts in np.int; what follows it fails in some fairseq anyway."""
    from fairseq.data import data_utils

    np = data_utils.np
    return [int(n) for n in np.fromiter((n for n in (1, 2)), np.int)]


@pytest.mark.parametrize("function, expected, in_numpy", [
    (sentences_as_blocks, [[5, 6, 2], [7, 2], [8, 9, 10, 2]], hasattr(np, "compat")),
    (bucketed_lengths, [3, 3, 3, 9, 9], hasattr(np, "compat")),
    (counts_of_spans, [1, 2], hasattr(np, "int")),
])  # fmt: skip
def test_works_where_numpy_has_retired_the_name(bare, patched, function, expected, in_numpy):
    patched.gives(expected, function)
    if in_numpy:
        pytest.skip("this numpy still has the name")
    bare.gives(Fails("no attribute|unexpected keyword"), function)


def names_in_numpy():
    import numpy as np
    from fairseq.data import data_utils

    assert data_utils.np.ndarray is np.ndarray
    return [hasattr(np, name) for name in ("int", "float", "compat")]


def test_numpy_itself_is_unchanged(bare, patched):
    patched.gives(bare.call(names_in_numpy), names_in_numpy)


# Masks of spans, of wav2vec and HuBERT


def masked(drawing, **settings):
    """Lengths of the masked runs of each row."""
    import itertools

    import torch
    from fairseq.data import data_utils

    draw = getattr(data_utils, drawing)
    fixed = {"seed": 1, "epoch": 1, "indices": torch.arange(2)}
    mask = draw((2, 60), None, 0.4, 3, require_same_masks=False, **fixed, **settings)
    return [[len([*run]) for one, run in itertools.groupby(row) if one] for row in mask]


@pytest.mark.parametrize("settings", [
    {"no_overlap": True, "min_space": 1},
    {"mask_type": "uniform", "mask_other": 2.0},
])  # fmt: skip
@pytest.mark.parametrize("drawing", ["compute_mask_indices", "compute_mask_indices_v3"])
def test_spans(drawing, settings, bare, patched):
    call = {"drawing": drawing, **settings}
    try:
        bare.call(masked, **call)
    except Failure as failure:
        if "has no attribute 'compute_mask_indices_v3'" in failure.message:
            pytest.skip("this fairseq has one function for masks")
        if "seed" in failure.message:
            pytest.skip("this fairseq draws from numpy's global generator")
        assert "randint" in failure.message or "np.int" in failure.message
    else:
        pytest.fail("fairseq needs no patch")
    rows = patched.call(masked, **call)
    assert all(sum(row) > 5 for row in rows)
    patched.gives(rows, masked, **call)  # the seed still counts
    if "no_overlap" in settings:
        assert {length for row in rows for length in row} == {3}


def drawn():
    import numpy as np
    from fairseq.data import data_utils

    ours, numpys = data_utils.np.random.default_rng(3), np.random.default_rng(3)
    same = [ours.random() == numpys.random(), ours.choice(9) == numpys.choice(9)]
    return [bool(one) for one in same] + [hasattr(numpys, "randint")]


def test_the_numbers_are_numpys(patched):
    patched.gives([True, True, False], drawn)


# The fast path of encoders, and BASE layers


def encode_with_padding():
    """Whether a loaded layer in evaluation computes what it computes in training."""
    import torch
    from fairseq.models.transformer import TransformerConfig
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    cfg = TransformerConfig()
    cfg.encoder.embed_dim = cfg.encoder.ffn_embed_dim = 8
    cfg.encoder.attention_heads, cfg.dropout = 2, 0.0
    trained, loaded = TransformerEncoderLayerBase(cfg), TransformerEncoderLayerBase(cfg)
    loaded.load_state_dict(trained.state_dict())
    x, padding = torch.randn(3, 2, 8), torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad():
        expected = trained.train()(x, padding)
        found = loaded.eval()(x, padding)
    return bool(torch.allclose(expected, found, atol=1e-6))


@pytest.mark.skipif(
    ENCODER_FAST_PATH.unneeded() is not None, reason=str(ENCODER_FAST_PATH.unneeded())
)
def test_a_batch_with_padding(bare, patched):
    bare.gives(Fails("Mask Type"), encode_with_padding)
    patched.gives(True, encode_with_padding)


def test_the_assignment_is_the_best():
    pytest.importorskip("scipy")
    scores = torch.tensor([[9.0, 8], [9, 1], [8, 7.5], [7, 6.5], [1, 0], [2, 9]])
    found = balanced_assignment(scores).tolist()
    assert sorted(found) == [*range(6)]

    def total(first):
        return float(sum(scores[token, 0 if token in first else 1] for token in range(6)))

    assert total(found[:3]) == max(map(total, itertools.combinations(range(6), 3)))
    with pytest.raises(ConfigurationError, match="found 5"):
        balanced_assignment(torch.zeros(5, 2))


# --bf16 without a TPU

WITHOUT_XLA = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed"
)


def parsed(flags):
    from fairseq import options

    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, ["data", "--arch", "lstm"] + flags)
    return [args.bf16, args.tpu]


@WITHOUT_XLA
def test_only_the_implied_tpu_is_undone(patched):
    patched.gives([True, False], parsed, flags=["--bf16"])
    patched.gives([True, True], parsed, flags=["--bf16", "--tpu"])
    patched.gives([False, True], parsed, flags=["--tpu"])
    patched.gives([False, False], parsed, flags=[])


@WITHOUT_XLA
@pytest.mark.parametrize("flags", [
    ["--bf16", "--fp16"],
    ["--memory-efficient-bf16", "--fp16"],
    ["--memory-efficient-fp16", "--bf16"],
])  # fmt: skip
def test_two_kinds_of_half_precision(flags, bare, patched):
    bare.gives(Fails("TPU"), parsed, flags=flags)
    refused = Fails("expected one of --.* and --.*; found both", "ConfigurationError")
    failure = patched.gives(refused, parsed, flags=flags)
    assert all(flag in failure.message for flag in flags)


# --bf16 in evaluation


def evaluated_in(flags):
    """The types of a model that a command loads, and of one that it prepares."""
    import torch
    from fairseq import checkpoint_utils, options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.distributed import utils
    from fairseq.models import BaseFairseqModel

    class Model(BaseFairseqModel):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

    def main(cfg):
        ((loaded,), *_), prepared = checkpoint_utils.load_model_ensemble_and_task(["a.pt"]), Model()
        prepared.prepare_for_inference_(cfg)
        found.extend(str(model.weight.dtype) for model in (loaded, prepared))

    found = []
    checkpoint_utils.load_model_ensemble_and_task = load = lambda paths: ([Model()], None, None)
    args = options.parse_args_and_arch(
        options.get_generation_parser(), ["data", "--task", "translation", "--cpu", *flags]
    )
    utils.call_main(convert_namespace_to_omegaconf(args), main)
    assert checkpoint_utils.load_model_ensemble_and_task is load
    return found


def test_bfloat16_reaches_the_models_of_commands_that_evaluate(bare, patched):
    full, half = ["torch.float32"] * 2, ["torch.bfloat16"] * 2
    bare.gives(full, evaluated_in, flags=["--bf16", "--path", "a.pt"])
    patched.gives(half, evaluated_in, flags=["--bf16", "--path", "a.pt"])
    patched.gives(full, evaluated_in, flags=["--path", "a.pt"])
    patched.gives(full, evaluated_in, flags=["--bf16"])  # a training, or a model of the hub


# What commands ask of their arguments


def parsed_task(command, flags):
    import contextlib
    import io

    from fairseq import options

    parser = getattr(options, f"get_{command}_parser")()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return str(options.parse_args_and_arch(parser, ["data", "--path", "x", *flags]).task)
    except SystemExit:
        return printed.getvalue()


def test_validation_names_the_missing_task(bare, patched):
    bare.gives(Fails(kind="KeyError"), parsed_task, command="validation", flags=[])
    assert "required: --task" in patched.call(parsed_task, command="validation", flags=[])
    given = ["--task", "language_modeling"]
    patched.gives("language_modeling", parsed_task, command="validation", flags=given)
    for command, default in (("generation", "translation"), ("eval_lm", "language_modeling")):
        patched.gives(default, parsed_task, command=command, flags=[])


def test_mbarts_task_trains_and_translates(bare, patched, data, tmp_path):
    """``--task translation_from_pretrained_bart``."""
    languages = ("--source-lang", "de", "--target-lang", "en")
    task = ("--task", "translation_from_pretrained_bart", "--langs", "de,en,fr", "--prepend-bos")
    training = train_arguments(data, tmp_path, "--max-epoch", "1", *task, *languages)
    with pytest.raises(Failure, match="no attribute 'args'"):
        bare.cli("fairseq_cli.train", *training)
    patched.cli("fairseq_cli.train", *training)
    translate = (str(data), "--path", tmp_path / "checkpoint_last.pt", "--cpu", *task, *languages)
    more = ("--results-path", tmp_path / "results", "--beam", "2", "--max-len-b", "5")
    patched.cli("fairseq_cli.generate", *translate, *more)
    found = (tmp_path / "results" / "generate-test.txt").read_text("utf-8")
    assert found.count("\nH-") + found.startswith("H-") == 100


# How workers are numbered where there is no GPU

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
}
SLURM = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
ONE_TASK_A_NODE = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
TWO_TASKS_A_NODE = {**SLURM, "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def inferred(env, workers):
    """Address, number of workers, number of this one, device, and processes to be spawned."""
    import os

    from fairseq.distributed import utils
    from omegaconf import OmegaConf

    os.environ.update(env)
    cfg = OmegaConf.create(
        {
            "distributed_init_method": None,
            "distributed_port": 29500,
            "distributed_world_size": workers,
            "distributed_rank": 0,
            "distributed_no_spawn": False,
            "distributed_num_procs": None,
            "device_id": 0,
            "pipeline_model_parallel": False,
            "tpu": False,
        }
    )
    utils.infer_init_method(cfg)
    spawned = None if cfg.distributed_no_spawn else cfg.distributed_num_procs
    return [
        *(cfg.distributed_init_method, cfg.distributed_world_size, cfg.distributed_rank),
        *(cfg.device_id, spawned),
    ]


@pytest.mark.parametrize("workers", [1, 4])
def test_torchrun_decides_on_the_number_of_workers(patched, workers):
    patched.gives(["env://", 4, 3, 0, None], inferred, env=TORCHRUN, workers=workers)


def test_no_launcher_is_left_alone(patched):
    assert patched.call(inferred, env={"WORLD_SIZE": "4"}, workers=1)[1:4] == [1, 0, 0]


def test_slurm_decides_on_the_number_of_a_worker(bare, patched, tmp_path):
    write_slurm(tmp_path)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    env = {**path, **ONE_TASK_A_NODE}
    assert bare.call(inferred, env=env, workers=2)[1] == 0
    patched.gives(["tcp://localhost:29500", 2, 1, 0, 1], inferred, env=env, workers=2)
    found = patched.call(inferred, env={**path, **TWO_TASKS_A_NODE}, workers=4)
    del found[3]  # the device
    assert found == ["tcp://localhost:29500", 4, 3, None]


def spawned():
    """How many workers a run starts that is told where to meet the others."""
    import torch
    from fairseq.distributed import utils
    from omegaconf import OmegaConf

    numbers = []
    torch.multiprocessing.spawn = lambda fn, args, nprocs, join: numbers.append(nprocs)
    settings = {
        "distributed_init_method": "tcp://localhost:29500",
        "distributed_no_spawn": False,
        "distributed_rank": 0,
        "distributed_world_size": 2,
    }
    config = {"common": {"cpu": True}, "distributed_training": settings}
    utils.call_main(OmegaConf.create(config), print)
    return numbers[0]


def test_a_worker_is_spawned(bare, patched):
    bare.gives(0, spawned)  # which ends with status 0, having trained nothing
    patched.gives(1, spawned)


def loaded(with_patch):
    """Numbers that come from a process for loading data, in one that joblib has started."""
    import multiprocessing

    import joblib.externals.loky  # noqa: F401  (registers its way of starting processes)
    import torch

    multiprocessing.set_start_method("loky", force=True)
    if with_patch:
        from spectral_fairseq.compat import patch_fairseq

        patch_fairseq()
    loader = torch.utils.data.DataLoader(list(range(4)), collate_fn=list, num_workers=1)
    return [number for batch in loader for number in batch]


def test_data_are_loaded_under_joblib(bare):
    pytest.importorskip("joblib")
    bare.gives(Fails("no attribute 'env'"), loaded, with_patch=False)
    bare.gives([0, 1, 2, 3], loaded, with_patch=True)
    assert JOBLIB_WORKERS.unneeded() is not None  # other processes are left alone


# The thread that loads batches ahead, when training stops in the middle of an epoch

_ABORT = -6
_STOP_EARLY = """
import sys
import torch
from fairseq.data import iterators

if sys.argv[1] == "patched":
    from spectral_fairseq.compat import patch_fairseq
    patch_fairseq()


class Batches:
    def __len__(self):
        return 100000

    def __iter__(self):
        for _ in range(len(self)):
            batch = torch.ones(64, 64)
            for _ in range(50):
                batch = torch.stack([batch[0]] * 64)
            yield batch


batches = iterators.BufferedIterator(10, Batches())
for _ in range(3):
    next(batches)
if sys.argv[2] == "error":
    raise KeyError("the run failed")
"""


@pytest.fixture
def stop_early(fork_server):
    def exit_status(kind, how="end"):
        command = [sys.executable, "-c", _STOP_EARLY, kind, how]
        env = fork_server.environment()
        return subprocess.run(command, env=env, capture_output=True).returncode

    return exit_status


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python suspends such threads")
def test_fairseq_as_installed_aborts(stop_early):
    assert any(stop_early("bare") == _ABORT for _ in range(10))  # it is a race


def test_patched_fairseq_exits_cleanly_or_with_the_status_of_an_error(stop_early):
    assert [stop_early("patched") for _ in range(2)] == [0, 0]
    assert stop_early("patched", "error") == 1


def everything():
    import torch
    from fairseq.data import iterators

    class Failing:
        def __len__(self):
            return 5

        def __iter__(self):
            yield from (torch.tensor(i) for i in range(3))
            raise OSError("disk")

    whole = [int(item) for item in iterators.BufferedIterator(2, [torch.tensor(i) for i in (4, 5)])]
    failing = iterators.BufferedIterator(2, Failing())
    seen = [int(next(failing)) for _ in range(3)]
    try:
        next(failing)
    except OSError as error:
        seen.append(str(error))
    return [whole, seen]


def stopped_while_full():
    from fairseq.data import iterators

    from spectral_fairseq.compat.machines import stop_all

    batches = iterators.BufferedIterator(1, list(range(100)))
    next(batches)
    stop_all()
    return bool(batches._consumer.is_alive())


def test_batches_and_errors_arrive_and_a_thread_that_waits_for_room_is_stopped(patched):
    patched.gives([[4, 5], [0, 1, 2, "disk"]], everything)
    patched.gives(False, stopped_while_full)
