"""``srun`` and ``scontrol`` of SLURM, as far as fairseq needs them, on this machine alone."""

from pathlib import Path

_SRUN = """#!/bin/bash
# srun [--nodes N] [--ntasks T] COMMAND...: T tasks, as if they were on N nodes
nodes=1 ntasks=1
while [[ $1 == --* ]]; do
    declare "${1#--}=$2"
    shift 2
done
export SLURM_JOB_ID=1 SLURM_JOB_NODELIST="node[1-$nodes]" SLURM_NNODES=$nodes SLURM_NTASKS=$ntasks
tasks=()
for ((task = 0; task < ntasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % (ntasks / nodes))) \\
        SLURM_NODEID=$((task / (ntasks / nodes))) "$@" &
    tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do
    wait "$task" || status=$?
done
exit $status
"""
_SCONTROL = """#!/bin/bash
# scontrol show hostnames LIST
[[ "$1 $2" == "show hostnames" && $3 == node* ]] && echo localhost
"""


def write_slurm(folder: Path) -> None:
    """Write both programs into a folder that is to be first on the path."""
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o755)
