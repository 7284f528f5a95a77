"""Checkpoints of language models, made from one that was trained, for tests of their evaluation."""

from types import SimpleNamespace

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import MODEL_DATACLASS_REGISTRY, build_model
from fairseq_cli import eval_lm
from omegaconf import OmegaConf

from spectral_fairseq.checkpoints.reading import load_checkpoint

TIED = "--share-decoder-input-output-embed"
STATEFUL = (
    *("--task", "stateful_language_modeling", "--batch-size", "4", "--batch-size-valid", "3"),
    *("--decoder-embed-dim", "8", "--decoder-hidden-size", "12", "--max-update", "12"),
    *("--lr", "0.05"),
)


def block_checkpoint(train):
    """``transformer_lm_sc`` with 16 tokens per sample."""
    return train("transformer_lm_sc", "spectrum_control", TIED) / "checkpoint_last.pt"


def stateful_checkpoint(train):
    """``awd_lstm_ptb``, validated in 3 streams, 16 tokens at a time."""
    return train("awd_lstm_ptb", "cross_entropy", *STATEFUL) / "checkpoint_last.pt"


# Settings of fairseq's adaptive softmax, for :func:`remade`.
ADAPTIVE = {
    "_name": "transformer_lm",
    "adaptive_softmax_cutoff": "12,24",
    "share_decoder_input_output_embed": False,
    "criterion": "adaptive_loss",
}


def remade(path, out, data, **flags):
    """The checkpoint at ``path`` with other model flags, weights drawn anew, saved at ``out``."""
    checkpoint = load_checkpoint(path)
    flags = {**checkpoint["cfg"]["model"], **flags}
    known = {"_name", *MODEL_DATACLASS_REGISTRY[flags["_name"]].__dataclass_fields__}
    checkpoint["cfg"]["model"] = {name: flags[name] for name in flags if name in known}
    dictionary = Dictionary.load(str(data / "dict.txt"))
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    torch.manual_seed(3)
    cfg = {name: checkpoint["cfg"][name] for name in ("model", "task", "common")}
    model = build_model(OmegaConf.create(cfg).model, task)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    checkpoint["model"] = model.state_dict()
    torch.save(checkpoint, out)
    return out


def tokens_of(data, split):
    """All word indices of a split, from its text."""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    lines = (data / f"{split}.txt").read_text("utf-8").splitlines()
    return torch.cat([dictionary.encode_line(one, add_if_not_exist=False) for one in lines]).long()


def perplexity_of_fairseq(path, data, split, block, context):
    """What fairseq-eval-lm finds in blocks of which ``context`` tokens repeat the one before."""
    parser = options.get_eval_lm_parser()
    arguments = [
        *(str(data), "--path", str(path), "--gen-subset", split, "--cpu", "--no-progress-bar"),
        *("--tokens-per-sample", str(block), "--context-window", str(context)),
        *"--required-batch-size-multiple 1 --batch-size 1 --num-workers 0".split(),
    ]
    args = options.parse_args_and_arch(parser, input_args=arguments)
    return float(eval_lm.main(convert_namespace_to_omegaconf(args))["perplexity"])
