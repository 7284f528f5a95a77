"""How workers are numbered where there is no GPU; tests/plugin/test_workers.py trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import pytest

from tests.compat.fairseq_process import Failure, FairseqProcess
from tests.slurm import write_slurm

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


def inferred(env: Dict[str, str], workers: int) -> List[Any]:
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


@pytest.fixture
def slurm(tmp_path: Path) -> Dict[str, str]:
    write_slurm(tmp_path)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("workers", [1, 4])
def test_torchrun_decides_on_the_number_of_workers(patched: FairseqProcess, workers: int) -> None:
    assert patched.call(inferred, env=TORCHRUN, workers=workers) == ["env://", 4, 3, 0, None]


def test_no_launcher_is_left_alone(patched: FairseqProcess) -> None:
    assert patched.call(inferred, env={"WORLD_SIZE": "4"}, workers=1)[1:4] == [1, 0, 0]


def test_slurm_with_one_task_a_node(
    bare: FairseqProcess, patched: FairseqProcess, slurm: Dict[str, str]
) -> None:
    env = {**slurm, **ONE_TASK_A_NODE}
    expected = ["tcp://localhost:29500", 2, 1, 0, 1]
    assert bare.call(inferred, env=env, workers=2)[1] == 0
    assert patched.call(inferred, env=env, workers=2) == expected


def test_slurm_with_a_task_for_each_worker(patched: FairseqProcess, slurm: Dict[str, str]) -> None:
    address, workers, rank, _, spawned = patched.call(
        inferred, env={**slurm, **TWO_TASKS_A_NODE}, workers=4
    )
    assert (address, workers, rank, spawned) == ("tcp://localhost:29500", 4, 3, None)


def spawned() -> int:
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


def test_a_worker_is_spawned(bare: FairseqProcess, patched: FairseqProcess) -> None:
    assert bare.call(spawned) == 0  # which ends with status 0, having trained nothing
    assert patched.call(spawned) == 1


def wrapped_by(backend: str) -> List[float]:
    """The gradient that a model on a CPU has after ``--ddp-backend``."""
    import tempfile
    from argparse import Namespace

    import torch
    from fairseq.models.distributed_fairseq_model import DistributedFairseqModel

    with tempfile.NamedTemporaryFile() as meeting:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1
        )
    settings = {"ddp_backend": backend, "device_id": 0, "tpu": False, "ddp_comm_hook": "none"}
    buckets = {"bucket_cap_mb": 25, "find_unused_parameters": False}
    more = {"broadcast_buffers": False, "gradient_as_bucket_view": False}
    args = Namespace(**settings, **buckets, **more, heartbeat_timeout=-1)
    layer = torch.nn.Linear(2, 1, bias=False)
    group = torch.distributed.group.WORLD
    model = DistributedFairseqModel(args, layer, group, torch.device("cpu"))
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    torch.distributed.destroy_process_group()
    return layer.weight.grad.flatten().tolist()


def test_the_default_backend_takes_a_model_on_a_cpu(
    bare: FairseqProcess, patched: FairseqProcess
) -> None:
    with pytest.raises(Failure, match="device_ids"):
        bare.call(wrapped_by, backend="pytorch_ddp")
    assert patched.call(wrapped_by, backend="pytorch_ddp") == [3, 4]
