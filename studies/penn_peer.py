"""The mixture of Penn Treebank beside its public implementation, from the same weights.

    git clone https://github.com/zihangdai/mos mos-reference
    python -m studies.penn_peer checkpoint_last.pt --data data-bin/penn --text penn --mos-reference
        mos-reference

Two trainings from other random numbers tell little. Here both models have the weights of one
checkpoint of the run ``mos``, and read the same segments. What is printed:

1. The mean loss in evaluation, and in training, with all dropouts. There each model draws masks of
   its own, so the difference has a standard error over the segments.
2. The change of the weights in some updates without dropout, ours by ``fairseq-train``: how far
   the two changes are apart, over the length of the public one's.

Our vocabulary has 8 rows more, which are no words of the text, and the public model adds 1e-8 to
each probability.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_awd_lstm import ALPHA, BETA, CLIP, module_from
from benchmarks.harness import positive
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.lm.carry import Carry
from studies.machine import find_command
from studies.penn_treebank import ARMS, RECIPE
from studies.translation import USER_DIR

STREAMS, LENGTH, LAYERS = 12, 70, 3
FIRST = 5_000  # in each stream, where the segments of the losses begin
RATE, DECAY = 20.0, 1.2e-6
SIZES = ("LSTM", 10_000, 280, 960, 620, LAYERS)
# On outputs, between layers, on embedded words, of words, of weights; then of latent contexts.
DROPOUTS, LATENT_DROPOUT, EXPERTS = (0.4, 0.225, 0.4, 0.1, 0.5), 0.29, 15
TABLE, HEAD = "decoder.network.embed_tokens.weight", "decoder.output_projection"
OWN_NAMES = {
    "encoder.weight": TABLE,
    "decoder.weight": TABLE,
    "decoder.bias": f"{HEAD}.bias",
    "prior.weight": f"{HEAD}.prior.weight",
    "latent.0.weight": f"{HEAD}.latent.weight",
    "latent.0.bias": f"{HEAD}.latent.bias",
}
WITHOUT_DROPOUT = (
    "--dropout 0 --input-dropout 0 --hidden-dropout 0 --word-dropout 0 --weight-drop 0"
    " --mixture-dropout 0"
)


def own_name(public: str) -> str:
    """The name of one of our entries, from that in the public model."""
    if not public.startswith("rnns."):
        return OWN_NAMES[public]
    _, layer, *_, name = public.split(".")  # weight_hh_l0_raw is the matrix before its dropout
    return f"decoder.network.layers.{layer}.lstm.{name.replace('_raw', '')}"


class Peers:
    """The public text and model, and the rows of our table that belong to its words.

    Args:
        clone: of the public code.
        text: folder with ``train.txt`` and so on.
        data: fairseq's data folder.
    """

    def __init__(self, clone: Path, text: Path, data: Path) -> None:
        from fairseq.data import Dictionary

        self._clone = clone
        corpus = module_from(clone, "data").Corpus(str(text))
        words = corpus.dictionary.idx2word
        self.tokens: Tensor = corpus.train
        own = Dictionary.load(str(data / "dict.txt"))
        named = {"<eos>": own.eos(), "<unk>": own.unk()}
        self.rows = torch.tensor([named.get(word, own.index(word)) for word in words])
        self.end = words.index("<eos>")

    def streams(self, tokens: Tensor) -> Tensor:
        """Tokens as the public ``batchify`` lays them out, shape (time, streams)."""
        count = len(tokens) // STREAMS
        return tokens[: count * STREAMS].view(STREAMS, count).t().contiguous()

    def weights(self, state: Dict[str, Tensor], names: Sequence[str]) -> Dict[str, Tensor]:
        """Our weights under public names, with the rows of its words."""
        missing = sorted({own_name(name) for name in names} - {*state})
        if missing:
            wanted = "a checkpoint of the run mos, whose table is a plain one"
            found_instead = f"one without {', '.join(missing[:3])}"
            raise CheckpointError(wanted, found_instead, "Give checkpoint_last.pt of that run.")
        found = {name: state[own_name(name)] for name in names}
        return {
            name: one[self.rows] if name.split(".")[0] in ("encoder", "decoder") else one
            for name, one in found.items()
        }

    def model(self, state: Dict[str, Tensor], dropout: bool) -> Any:
        """The public model with our weights."""
        dropouts, latent = (DROPOUTS, LATENT_DROPOUT) if dropout else ((0,) * 5, 0)
        made = module_from(self._clone, "model").RNNModel(*SIZES, *dropouts, True, latent, EXPERTS)
        made.load_state_dict(self.weights(state, [*made.state_dict()]))
        return made


def mean_losses(read: Callable[[Tensor], Tensor], streams: Tensor, count: int) -> List[float]:
    """The loss of each of some segments in a row.

    Args:
        read: log-probabilities, shape (T B, N), after a segment, shape (T, B).
        streams: shape (time, B).
        count: of segments.
    """
    losses = []
    for start in range(FIRST, FIRST + count * LENGTH, LENGTH):
        with torch.no_grad():
            log_p = read(streams[start : start + LENGTH])
        targets = streams[start + 1 : start + 1 + LENGTH].flatten()
        losses.append(float(F.nll_loss(log_p, targets)))
    return losses


def compare_losses(peers: Peers, checkpoint: Path, data: Path, count: int) -> None:
    """Print the losses of both models, in training and in evaluation."""
    from fairseq import checkpoint_utils

    import spectral_fairseq.plugin  # noqa: F401  (the task and the architecture)

    load = checkpoint_utils.load_model_ensemble_and_task
    (own,), _, _ = load([str(checkpoint)], arg_overrides={"data": str(data)})
    public = peers.model(own.state_dict(), dropout=True)
    streams = peers.streams(peers.tokens)
    # The public model cannot be trained after an evaluation, which sets its matrices.
    for is_training in (True, False):
        state, carry = [public.train(is_training).init_hidden(STREAMS)], Carry()
        own.train(is_training)

        def of_public(segment: Tensor, state: List[Any] = state) -> Tensor:
            log_p, state[0] = public(segment, state[0])
            return log_p.flatten(0, 1)

        def of_own(segment: Tensor, carry: Carry = carry) -> Tensor:
            log_p, _ = own.decoder(peers.rows[segment].t().contiguous(), carry=carry)
            return log_p.transpose(0, 1).flatten(0, 1)[:, peers.rows]

        theirs, ours = (mean_losses(read, streams, count) for read in (of_public, of_own))
        differences = [one - other for one, other in zip(ours, theirs)]
        error = statistics.stdev(differences) / count**0.5
        mean, public_mean = statistics.fmean(differences), statistics.fmean(theirs)
        print(
            f"{'training' if is_training else 'evaluation'}: {count} segments, public "
            f"{public_mean:.5f} nats, ours {mean:+.5f} (standard error {error:.5f})",
            flush=True,
        )


def public_updates(model: Any, streams: Tensor, count: int) -> None:
    """Updates as in the public ``main.py``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY)
    state = model.train().init_hidden(STREAMS)
    for start in range(0, count * LENGTH, LENGTH):
        state = [tuple(part.detach() for part in layer) for layer in state]
        optimizer.zero_grad()
        segment, targets = (streams[at : at + LENGTH] for at in (start, start + 1))
        log_p, state, raw, dropped = model(segment, state, return_h=True)
        loss = F.nll_loss(log_p.flatten(0, 1), targets.flatten())
        loss = loss + ALPHA * dropped[-1].pow(2).mean()
        loss = loss + BETA * (raw[-1][1:] - raw[-1][:-1]).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def weights_of(checkpoint: Path) -> Dict[str, Tensor]:
    """The entries of a model."""
    state: Dict[str, Tensor] = load_checkpoint(checkpoint)["model"]
    return state


def own_updates(checkpoint: Path, data: Path, count: int) -> Dict[str, Tensor]:
    """The weights after updates by ``fairseq-train``, from those of a checkpoint."""
    flags = f"{RECIPE} {ARMS['mos']} {WITHOUT_DROPOUT}".replace("--variable-bptt ", "")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            find_command("fairseq-train"),
            str(data),
            "--user-dir",
            USER_DIR,
            *shlex.split(flags),
        ]
        command += ["--finetune-from-model", str(checkpoint), "--save-dir", folder, "--cpu"]
        command += ["--max-update", str(count), "--validate-after-updates", str(count + 1)]
        subprocess.run([*command, "--no-epoch-checkpoints"], check=True, stdout=subprocess.DEVNULL)
        return weights_of(Path(folder) / "checkpoint_last.pt")


def compare_updates(peers: Peers, checkpoint: Path, data: Path, count: int) -> None:
    """Print how far the changes of the weights are apart."""
    before = weights_of(checkpoint)
    after = own_updates(checkpoint, data, count)
    public = peers.model(before, dropout=False)
    # As fairseq's streams, which begin with an end of sentence.
    tokens = torch.cat([torch.tensor([peers.end]), peers.tokens])
    public_updates(public, peers.streams(tokens), count)
    names = [name for name, _ in public.named_parameters()]
    starts, ours = (peers.weights(state, names) for state in (before, after))
    apart: List[Tuple[float, str]] = []
    for name, parameter in public.named_parameters():
        change = parameter.detach() - starts[name]
        apart.append((float((ours[name] - parameter.detach()).norm() / change.norm()), name))
    largest, name = max(apart)
    print(f"{count} updates: changes differ by {min(apart)[0]:.1e} to {largest:.1e} ({name})")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.penn_peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="of the run mos")
    add("--data", type=Path, required=True, metavar="DIR", help="binarised data")
    add("--text", type=Path, required=True, metavar="DIR", help="the text")
    add("--mos-reference", type=Path, required=True, metavar="CLONE")
    add("--segments", type=positive, default=12, metavar="N", help="default: %(default)s")
    add("--updates", type=positive, default=3, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    torch.manual_seed(1)
    peers = Peers(args.mos_reference, args.text, args.data)
    compare_losses(peers, args.checkpoint, args.data, args.segments)
    compare_updates(peers, args.checkpoint, args.data, args.updates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
