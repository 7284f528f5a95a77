"""Small fairseq objects built in the process: dictionary, task, batch, model, criterion."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from omegaconf import OmegaConf

import spectral_fairseq.plugin  # noqa: F401  (registers with fairseq)
from spectral_fairseq.compat.dead_encoder_keys import DEAD
from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.plugin.find import find_svd_tables

# fairseq 0.12.2 names a function in its fast path that torch has from 1.13 on.
SCRIPTS = pytest.mark.skipif(
    "_load_from_state_dict" in vars(TransformerEncoderLayerBase)
    and not hasattr(torch, "_nested_tensor_from_mask_left_aligned"),
    reason="this torch cannot script the encoder of this fairseq",
)

DROPOUTS = (
    *("dropout", "attention_dropout", "activation_dropout", "input_dropout", "hidden_dropout"),
    *("word_dropout", "weight_drop", "mixture_dropout"),
)
SIZES = {
    "encoder_embed_dim": 16,
    "decoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "decoder_ffn_embed_dim": 24,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "decoder_output_dim": 16,
    "decoder_input_dim": 16,
    **dict.fromkeys(DROPOUTS, 0.0),
}


def words(count=45):
    dictionary = Dictionary()
    for index in range(count):
        dictionary.add_symbol(f"w{index}", n=count - index)
    dictionary.finalize(padding_factor=8)  # adds madeupwords
    return dictionary


@pytest.fixture
def task():
    dictionary = words()
    # fairseq's convolutional and recurrent models ask for the positions.
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        max_positions=lambda: (64, 64),
    )


def build_model(task, arch="transformer_sc", seed=1, **options):
    from fairseq.models import MODEL_DATACLASS_REGISTRY, build_model

    fields = MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__
    options = {**SIZES, "share_all_embeddings": True, **options}
    node = {key: value for key, value in options.items() if key in fields}
    config = OmegaConf.create(
        {
            "model": {"_name": arch, **node},
            "common": {"tpu": False},
            "task": {"add_bos_token": False, "tokens_per_sample": 32, "max_target_positions": 32},
        }
    )
    torch.manual_seed(seed)
    return build_model(config.model, task)


def build_host_model(task, arch, seed=1, **options):
    """A model of fairseq's own, built from argparse options."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    args = Namespace(**{**SIZES, "criterion": None, **options})
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task)


FAIRSEQ_MODELS = {
    "transformer shared": ("transformer", {"share_all_embeddings": True}),
    "transformer separate": ("transformer", {}),
    "adaptive softmax": ("transformer", {"adaptive_softmax_cutoff": "20,30"}),
    "lstm shared": (
        "lstm",
        {"share_decoder_input_output_embed": True, "decoder_out_embed_dim": 16},
    ),
    "lstm separate": ("lstm", {"decoder_out_embed_dim": 8}),  # its output layer has a bias
    "fconv": (
        "fconv",
        {
            "encoder_layers": "[(16, 3)]",
            "decoder_layers": "[(16, 3)]",
            "decoder_attention": "True",
            "max_source_positions": 64,
            "max_target_positions": 64,
            "share_input_output_embed": False,
            "decoder_out_embed_dim": 16,
        },
    ),
}
KINDS = [table.kind for table in TABLES]
# Cross entropy, under a criterion that has a penalty by default.
OFF = {"name": "mle_cosreg", "cosreg_weight": 0.0}
LSTM = {"decoder_hidden_size": 12, "decoder_layers": 2}
XL = {"decoder_layers": 2, "decoder_head_dim": 6, "mem_len": 5, "adaptive_softmax_cutoff": ""}
MIXTURE = {"output_head": "mos", "mixture_components": 3}
OUR_MODELS = {
    **{kind: ("transformer_sc", {"embedding_type": kind}) for kind in KINDS},
    "capped": ("transformer_sc", {"embedding_type": "plain", "logit_softcap": 2.0}),
    "mos": ("transformer_mos", {"mixture_components": 3}),
    "moc": ("transformer_mos", {"mixture_components": 3, "output_head": "moc"}),
    "language model": ("transformer_lm_sc", {}),
    "awd-lstm": ("awd_lstm_wt2", {**LSTM, "embedding_type": "plain"}),
    "awd-lstm mos": ("awd_lstm_mos_wt2", {**LSTM, **MIXTURE, "decoder_last_hidden_size": 14}),
    "awd-lstm moc": ("awd_lstm_wt2", {**LSTM, "output_head": "moc"}),
    "xl": ("transformer_xl_wt103_small", XL),
    "xl mos": ("transformer_xl_wt103_small", {**XL, **MIXTURE}),
    "xl adaptive": ("transformer_xl_wt103_small", {**XL, "adaptive_softmax_cutoff": "10,20,40"}),
}
LONGEST_FIRST = ((6, 2), (5, 4), (3, 7))  # fairseq's LSTM wants the longest source first


def any_model(task, name, **options):
    """One of :data:`OUR_MODELS` or :data:`FAIRSEQ_MODELS`."""
    if name in OUR_MODELS:
        arch, sizes = OUR_MODELS[name]
        return build_model(task, arch, **{**sizes, **options})
    arch, sizes = FAIRSEQ_MODELS[name]
    return build_host_model(task, arch, **{**sizes, **options})


def parameters_in_use(model):
    """Names and parameters, without copies that fairseq 0.12.2 keeps for its fast path."""
    named = model.named_parameters()
    return {name: one for name, one in named if name.rpartition(".")[2] not in DEAD}


def build_criterion(task, name="spectrum_control", **options):
    from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, build_criterion

    config = OmegaConf.structured(CRITERION_DATACLASS_REGISTRY[name])
    OmegaConf.set_struct(config, False)
    config = OmegaConf.merge(config, {"_name": name, "sentence_avg": False, **options})
    return build_criterion(config, task)


def make_sample(task, sizes=((5, 4), (3, 7), (6, 2)), seed=0):
    """A padded translation batch; ``sizes`` are (source, target) lengths, eos included."""
    generator = torch.Generator().manual_seed(seed)
    pad, eos = task.target_dictionary.pad(), task.target_dictionary.eos()
    bsz = len(sizes)
    src = torch.full((bsz, max(s for s, _ in sizes)), pad)
    tgt = torch.full((bsz, max(t for _, t in sizes)), pad)
    for row, (source, target) in enumerate(sizes):
        src[row, -source:] = torch.randint(4, 49, (source,), generator=generator)  # left-padded
        src[row, -1] = eos
        tgt[row, :target] = torch.randint(4, 49, (target,), generator=generator)
        tgt[row, target - 1] = eos
    previous = torch.full_like(tgt, pad)
    for row, (_, target) in enumerate(sizes):
        previous[row, 0] = eos
        previous[row, 1:target] = tgt[row, : target - 1]
    return {
        "id": torch.arange(bsz),
        "nsentences": bsz,
        "ntokens": sum(t for _, t in sizes),
        "net_input": {
            "src_tokens": src,
            "src_lengths": torch.tensor([s for s, _ in sizes]),
            "prev_output_tokens": previous,
        },
        "target": tgt,
    }


def sample_for(model, task):
    """:func:`make_sample`, or its target side for a model that reads no source."""
    sample = make_sample(task)
    if "encoder" not in model._modules:
        tokens = sample["net_input"]["prev_output_tokens"]
        sample["net_input"] = {"src_tokens": tokens, "src_lengths": tokens.ne(1).sum(1)}
    return sample


def segments(task, bsz=3, length=7, seed=0, pad=0):
    """A batch of ``bsz`` segments of random words, the last one with ``pad`` padding tokens."""
    padding = task.target_dictionary.pad()
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(4, 49, (bsz, length + 1), generator=generator)
    tokens, target = text[:, :-1].clone(), text[:, 1:].clone()
    if pad:
        tokens[-1, -pad:] = target[-1, -pad:] = padding
    return {
        "net_input": {"src_tokens": tokens, "src_lengths": torch.full((bsz,), length)},
        "target": target,
        "ntokens": int(target.ne(padding).sum()),
    }


def split(sample, rows):
    """The sub-batch of ``rows``, padding kept."""
    target = sample["target"][rows]
    return {
        "id": sample["id"][rows],
        "nsentences": len(rows),
        "ntokens": int(target.ne(1).sum()),
        "net_input": {key: value[rows] for key, value in sample["net_input"].items()},
        "target": target,
    }


def gradients(model, loss):
    """Names and gradients of the parameters that a loss reaches."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected, **tolerance):
    """Compare two dictionaries of tensors, such as :func:`gradients`."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(
            found[name], one, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def off_constraint(model):
    """Move the SVD table away from its constraint set, so that no penalty is zero by accident."""
    (table,) = find_svd_tables(model)
    with torch.no_grad():
        table.U.mul_(1.1)
        table.V.add_(torch.randn(table.V.shape, generator=torch.Generator().manual_seed(3)))
        table.sigma[0] = -2.0
    return table
