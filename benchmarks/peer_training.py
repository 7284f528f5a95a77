"""A translation model of another package, trained on random words; prints when its updates began.

    PYTHON benchmarks/peer_training.py NAME --words 9992 --sentences 256 --length 16 ...

``bench_processes --peers PYTHON`` calls it with the Python of an environment that has the packages;
nothing of this project is imported. The loop is the same for all: the package's model and loss,
forward and backward pass over each batch of an update, and torch's Adam.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

DROPOUT, SMOOTHING = 0.3, 0.1
PAD, EOS = 1, 2


def marian(args: argparse.Namespace) -> Any:
    """Marian's classes of transformers."""
    # Imported by transformers where it is installed, be it for another build of torch.
    sys.modules["torchaudio"] = None  # type: ignore[assignment]
    from transformers import MarianConfig, MarianMTModel

    sizes = {}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = args.layers
        sizes[f"{side}_ffn_dim"] = args.ffn
        sizes[f"{side}_attention_heads"] = args.heads
    config = MarianConfig(
        vocab_size=args.words,
        d_model=args.dim,
        **sizes,
        activation_function="relu",
        dropout=DROPOUT,
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        use_cache=False,
    )
    model = MarianMTModel(config)

    def loss(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        before = torch.cat((target[:, -1:], target[:, :-1]), 1)
        logits = model(input_ids=source, decoder_input_ids=before).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), label_smoothing=SMOOTHING
        )

    return model, loss


def joeynmt(args: argparse.Namespace) -> Any:
    """JoeyNMT's Transformer and its loss."""
    from joeynmt.model import build_model
    from joeynmt.vocabulary import Vocabulary

    symbols = SimpleNamespace(
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_id=2,
        pad_id=PAD,
        eos_id=3,
        unk_id=0,
        sep_token=None,
        lang_tags=[],
    )
    words = Vocabulary([f"w{number}" for number in range(args.words - 4)], symbols)
    side = {
        "type": "transformer",
        "num_layers": args.layers,
        "num_heads": args.heads,
        "embeddings": {"embedding_dim": args.dim, "scale": True, "dropout": DROPOUT},
        "hidden_size": args.dim,
        "ff_size": args.ffn,
        "dropout": DROPOUT,
        "layer_norm": "post",
    }
    settings = {
        "encoder": side,
        "decoder": side,
        "tied_embeddings": True,
        "tied_softmax": True,
        "initializer": "xavier_uniform",
        "embed_initializer": "xavier_uniform",
    }
    model = build_model(settings, src_vocab=words, trg_vocab=words)
    model.loss_function = ("crossentropy", SMOOTHING)

    def loss(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        before = torch.cat((target[:, -1:], target[:, :-1]), 1)
        found = model(
            return_type="loss",
            src=source,
            src_length=torch.full((len(source),), source.size(1)),
            src_mask=torch.ones(len(source), 1, source.size(1), dtype=torch.bool),
            trg_input=before,
            trg=target,
            trg_mask=torch.ones(len(target), 1, target.size(1), dtype=torch.bool),
        )
        return found[0] / target.numel()

    return model, loss


def eole(args: argparse.Namespace) -> Any:
    """The Transformer of eole and its loss."""
    import pyonmttok
    from eole.config.run import TrainConfig
    from eole.models.model import get_model_class
    from eole.utils.loss import LossCompute

    symbols = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = pyonmttok.build_vocab_from_tokens(
        [f"w{number}" for number in range(args.words - 4)], special_tokens=list(symbols.values())
    )
    vocabularies = {"src": words, "tgt": words, "specials": symbols}
    config = TrainConfig(
        data={},
        src_vocab="",
        tgt_vocab="",
        share_vocab=True,
        model={
            "architecture": "transformer",
            "hidden_size": args.dim,
            "embeddings": {"word_vec_size": args.dim, "position_encoding_type": "SinusoidalConcat"},
            "layers": args.layers,
            "heads": args.heads,
            "transformer_ff": args.ffn,
            "share_embeddings": True,
            "share_decoder_embeddings": True,
        },
        training={
            "dropout": [DROPOUT],
            "attention_dropout": [0.0],
            "label_smoothing": SMOOTHING,
            "gpu_ranks": [],
            "world_size": 0,
        },
    )
    kind = get_model_class(config.model)
    model = kind.for_training(config.model, vocabularies, config.training)
    compute = LossCompute.from_config(config, model, vocabularies)

    def loss(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        begun = torch.cat((target[:, -1:], target), 1)  # it cuts the last word off
        lengths = torch.full((len(source),), source.size(1))
        found = model(source, begun, lengths)
        scores = model.generator(found.dec_out.flatten(0, 1)).float()
        return compute.criterion(scores, target.flatten()) / target.numel()

    return model, loss


PEERS = {"marian": marian, "joeynmt": joeynmt, "eole": eole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(PEERS))
    numbers = ("words", "sentences", "length", "dim", "ffn", "layers", "heads")
    for number in (*numbers, "update-freq", "updates"):
        parser.add_argument(f"--{number}", type=int, required=True)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    torch.manual_seed(1)
    model, loss = PEERS[args.name](args)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(2)
    begun = []
    for _ in range(args.updates + 2):
        begun.append((time.perf_counter(), time.process_time()))
        optimizer.zero_grad()
        for _ in range(args.update_freq):
            size = (2, args.sentences, args.length)
            words = torch.randint(4, args.words, size, generator=generator)
            words[..., -1] = EOS
            (loss(*words) / args.update_freq).backward()
        optimizer.step()
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"begun": begun, "mib": int(peak) / 2**10}), flush=True)


if __name__ == "__main__":
    main()
