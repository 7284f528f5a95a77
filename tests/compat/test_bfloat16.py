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


def evaluated_in(flags, checkpoint):
    """The types of a model that a command loads, and of a batch of numbers that it reads."""
    import torch
    from fairseq import checkpoint_utils, options
    from fairseq.data.iterators import EpochBatchIterator
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.distributed import utils

    def main(cfg):
        (model,), *_ = checkpoint_utils.load_model_ensemble_and_task([checkpoint])
        numbers = torch.utils.data.TensorDataset(torch.ones(2))
        batches = EpochBatchIterator(numbers, lambda pairs: {"n": pairs[0][0]}, [[0], [1]])
        batch = next(batches.next_epoch_itr())
        found.extend([str(next(model.parameters()).dtype), str(batch["n"].dtype)])

    found = []
    args = options.parse_args_and_arch(
        options.get_generation_parser(), ["data", "--task", "translation", "--cpu", *flags]
    )
    utils.call_main(convert_namespace_to_omegaconf(args), main)
    main(None)  # what comes after the command
    return found


def test_bfloat16_reaches_models_and_numbers_of_commands_that_evaluate(
    bare, patched, checkpoint, monkeypatch
):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # or the bare one cannot load
    full, half = ["torch.float32"] * 2, ["torch.bfloat16"] * 2
    call = {"function": evaluated_in, "checkpoint": str(checkpoint)}
    evaluating = ["--bf16", "--path", "a.pt"]
    bare.gives([*full, *full], **call, flags=evaluating)
    patched.gives([*half, *full], **call, flags=evaluating)
    patched.gives([*full, *full], **call, flags=["--path", "a.pt"])
    patched.gives([*full, *full], **call, flags=["--bf16"])  # a training, or a model of the hub
