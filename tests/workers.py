"""Two processes of one group on this machine, for what data-parallel workers have to agree on."""

import uuid

import torch
import torch.multiprocessing

# Both workers are forks of a process that has imported these, which takes each of them seconds.
PRELOADED = ["torch.distributed.fsdp", "pytest", "tests.training.models"]


def on_two_workers(function, folder, *arguments):
    """What ``function(rank, *arguments)`` returns in each of them, through files in ``folder``."""
    meeting = f"{folder}/{uuid.uuid4()}"  # a file, since another process might take a port
    given = (function, meeting, str(folder), arguments)
    torch.multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(_worker, given, nprocs=2, start_method="forkserver")
    return [torch.load(f"{folder}/{rank}.pt") for rank in (0, 1)]


def _worker(rank, function, meeting, folder, arguments):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
