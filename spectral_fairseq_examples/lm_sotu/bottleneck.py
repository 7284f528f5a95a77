"""Measure the softmax bottleneck: the rank of what a softmax, a MoC and mixtures of softmaxes say.

Prepares the corpus, trains an AWD-LSTM with each output layer and each seed for the same number of
updates, and measures perplexity, and the rank, the singular values and the expected pairwise KL
divergence of the log-probabilities, as in section 3.3 and appendix C of Yang et al., ICLR 2018.
Finished steps are not repeated: after an interruption give the same command.
"""

from __future__ import annotations

import argparse
from typing import Dict, Optional, Sequence, Tuple

from spectral_fairseq_examples.common.command_line import exit_status
from spectral_fairseq_examples.common.comparison_options import add_sizes, comparison_parser
from spectral_fairseq_examples.lm_sotu.corpus_options import add_corpus
from spectral_fairseq_examples.lm_sotu.methods import NO_PENALTY
from spectral_fairseq_examples.lm_sotu.settings import BottleneckSettings

KINDS = ("softmax", "moc", "mos")
COMPONENTS = (1, 3, 7, 15)
"""K of the mixtures. Table 7 of the paper has 3, 5, 7, 10, 15 and 20."""

COMMON = (
    *("--arch", "awd_lstm_wt2", "--blockwise-loss", *NO_PENALTY),
    # At this budget a mixture learns with Adam, and hardly with SGD.
    *("--optimizer", "adam", "--lr-scheduler", "fixed"),
)
# With seed 1 and K = 3 the training perplexity after 300 updates is 371 with the paper's scale of
# the contexts, 1, and 316 with 4.
MIXTURE = ("--mixture-context-scale", "4", "--mixture-dropout", "0")


def output_layers(kinds: Sequence[str], components: Sequence[int]) -> Dict[str, Tuple[str, ...]]:
    """The flags of each output layer by its name: ``softmax``, ``moc-15``, ``mos-1``, ``mos-3``, ..

    Args:
        kinds: some of :data:`KINDS`.
        components: K of the mixtures of softmaxes. The mixture of contexts has the largest.
    """
    layers: Dict[str, Tuple[str, ...]] = {}
    for kind in kinds:
        if kind == "softmax":
            layers[kind] = COMMON
            continue
        for count in [max(components)] if kind == "moc" else sorted(set(components)):
            head = ("--output-head", kind, "--mixture-components", str(count))
            layers[f"{kind}-{count}"] = (*COMMON, *head, *MIXTURE)
    return layers


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parsed command line."""
    parser = comparison_parser(
        __doc__.split("\n\n")[0], KINDS, 600, "outputs/lm_sotu_bottleneck", "; about 2,620 an epoch"
    )
    add = parser.add_argument
    add(
        "--components",
        type=int,
        nargs="+",
        default=list(COMPONENTS),
        metavar="K",
        help="of the mixtures of softmaxes; moc has the largest (default: 1 3 7 15)",
    )
    add(
        "--tokens",
        type=int,
        default=4096,
        metavar="N",
        help="of valid, whose log-probabilities are measured (default: %(default)s)",
    )
    add_corpus(parser)
    sizes = (("dim", "width d of the embeddings"), ("hidden", "width of the LSTM layers"))
    add_sizes(parser, BottleneckSettings, sizes)
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:
        from spectral_fairseq_examples.lm_sotu import bottleneck_experiment  # imports torch

        return f"\n{bottleneck_experiment.measure(arguments)}"

    return exit_status(action, arguments.work_dir)
