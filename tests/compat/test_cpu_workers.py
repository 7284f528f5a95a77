"""How workers are numbered where there is no GPU.

tests/plugin/test_workers.py trains with several workers.
"""

import os

import pytest

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
