from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Failure, FairseqProcess

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_the_error_names_the_flags(
    bare: FairseqProcess, patched: FairseqProcess, data: Path, tmp_path: Path
) -> None:
    arguments = train_arguments(data, tmp_path, "--max-epoch", "1", "--fp16")
    with pytest.raises(Failure) as before:
        bare.cli("fairseq_cli.train", *arguments)
    assert "--fp16" not in before.value.message
    with pytest.raises(Failure, match="--fp16-no-flatten-grads") as after:
        patched.cli("fairseq_cli.train", *arguments)
    assert after.value.kinds[0] == "UnsupportedError"


def unflattened() -> str:
    import torch
    from fairseq.optim.fp16_optimizer import FP16Optimizer

    parameters = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16))]
    copies = FP16Optimizer.build_fp32_params(None, parameters, flatten=False)
    return str(copies[0].dtype)


def test_parameters_kept_apart_are_allowed(patched: FairseqProcess) -> None:
    assert patched.call(unflattened) == "torch.float32"
