"""``--bf16`` in training and evaluation."""

import importlib.util

import pytest

from tests.compat.fairseq_process import Fails

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
