"""``spectral-fairseq next-words``: the most probable next words of language models side by side."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Dict, Sequence

from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.commands.arguments import add_format, add_no_verify
from spectral_fairseq.commands.importing import import_plugin
from spectral_fairseq.commands.shared import text_with_sentences
from spectral_fairseq.errors import arguments_as_flags, listed, printable

DESCRIPTION = """\
The most probable next words of one or several language models after each of your sentences, side
by side, as in table 14 of the paper on mixtures of softmaxes. A sentence is a line of words
separated by blanks, as in the text of the training; </s> within it ends a sentence. With
--largest-gaps the command looks inside the sentences, for the positions at which the first of two
models is furthest ahead of the second on the true next word.
Example: echo "the end of" | spectral-fairseq next-words lm.pt --data data-bin
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models, the sentences and what is listed."""
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="CKPT", help="language models saved by fairseq-train")
    add("--data", required=True, metavar="DIR", help="folder of binarised data, with dict.txt")
    add(
        "--sentences",
        default="-",
        metavar="FILE",
        help="text with a sentence on each line (default: standard input)",
    )
    add("--top", type=int, default=5, metavar="N", help="words to list")
    add(
        "--largest-gaps",
        type=int,
        default=0,
        metavar="N",
        help="list N positions at which the first of two models is furthest ahead of the second "
        "(default: the end of each sentence)",
    )
    add("--labels", metavar="A,B,...", help="names of the checkpoints, separated by commas")
    add_format(parser)
    add_no_verify(parser)


def run(args: argparse.Namespace) -> int:
    """Print the next words; returns the exit status 0."""
    paths = [checkpoint_file(path) for path in args.checkpoints]
    text = text_with_sentences(args.sentences, "--sentences")
    sentences = [line.split() for line in text.split("\n") if line.strip()]
    import_plugin()
    from spectral_fairseq.analysis.results import labels_for
    from spectral_fairseq.commands.models import load_language_model
    from spectral_fairseq.commands.predicted_words import compare_next_words

    with arguments_as_flags(labels="--labels"):
        labels = labels_for(paths, args.labels.split(",") if args.labels else None)
    models = [load_language_model(path, args.data, {}, verify=args.verify) for path in paths]
    for remark in dict.fromkeys(model.remark for model in models if model.remark):
        print(printable(f"warning: {remark}"), file=sys.stderr)
    dictionary = models[0].dictionary
    words = {word for sentence in sentences for word in sentence}
    unknown = sorted(word for word in words if dictionary.index(word) == dictionary.unk())
    if unknown:
        shown = listed(unknown, 5)
        print(printable(f"warning: read as {dictionary.unk_word}: {shown}"), file=sys.stderr)
    with arguments_as_flags(top="--top", gaps="--largest-gaps"):
        places = compare_next_words(
            list(zip(labels, models)), sentences, args.top, args.largest_gaps
        )
    print(json.dumps({"places": places}) if args.format == "json" else printable(as_text(places)))
    return 0


def as_text(places: Sequence[Dict[str, Any]]) -> str:
    """The positions as plain text, one paragraph each."""
    parts = []
    for number, place in enumerate(places, 1):
        width = max(len(model["label"]) for model in place["models"])
        lines = [f"{number}  {place['context']} __?__".replace("  __", " __")]
        for model in place["models"]:
            words = "  ".join(f"{one['word']} {one['probability']:.2f}" for one in model["next"])
            lines.append(f"   {model['label']:<{width}}  {words}")
        if place["reference"] is not None:
            true = "  ".join(
                f"{model['label']} {model['reference']:.2g}" for model in place["models"]
            )
            lines.append(f"   next word: {place['reference']}  ({true})")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "The first model is ahead nowhere."
