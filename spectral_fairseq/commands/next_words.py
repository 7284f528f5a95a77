"""``spectral-fairseq next-words``: the most probable next words of language models side by side."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.commands.shared import import_plugin, no_verify, text_with_sentences
from spectral_fairseq.errors import arguments_as_flags, listed, printable
from spectral_fairseq.options import option

DESCRIPTION = """\
The most probable next words of one or several language models after each of your sentences, side
by side, as in table 14 of the paper on mixtures of softmaxes. A sentence is a line of words
separated by blanks, as in the text of the training; </s> within it ends a sentence. With
--largest-gaps the command looks inside the sentences, for the positions at which the first of two
models gives the true next word the highest probability in comparison with the second.
Example: echo "the end of" | spectral-fairseq next-words lm.pt --data data-bin
"""


@dataclass
class Arguments:
    """The arguments of ``next-words``."""

    checkpoints: Tuple[str, ...] = option(
        (), "language models saved by fairseq-train", metavar="CKPT", positional=True
    )
    data: str = option("", "folder of binarised data, with dict.txt", metavar="DIR", required=True)
    sentences: str = option(
        "-", "text with a sentence on each line (default: standard input)", metavar="FILE"
    )
    top: int = option(5, "words to list", metavar="N")
    largest_gaps: int = option(
        0,
        "list N positions at which the first of two models is ahead of the second most "
        "(default: the end of each sentence)",
        metavar="N",
    )
    labels: Optional[str] = option(
        None, "names of the checkpoints, separated by commas", metavar="A,B,..."
    )
    format: str = option("text", "format of the output", choices=("text", "json"))
    verify: bool = no_verify()


def run(args: Arguments) -> int:
    """Print the next words; returns the exit status 0."""
    paths = [checkpoint_file(path) for path in args.checkpoints]
    text = text_with_sentences(args.sentences, "--sentences")
    sentences = [line.split() for line in text.split("\n") if line.strip()]
    import_plugin()
    from spectral_fairseq.analysis.results import labels_for
    from spectral_fairseq.commands.models import load_language_model
    from spectral_fairseq.commands.predictions import compare_next_words

    labels = labels_for(paths, args.labels.split(",") if args.labels else None)
    models = [load_language_model(path, args.data, {}, verify=args.verify) for path in paths]
    for remark in dict.fromkeys(model.remark for model in models if model.remark):
        print(printable(f"warning: {remark}"), file=sys.stderr)
    dictionary = models[0].dictionary
    words = {word for one in sentences for word in one}
    unknown = sorted(word for word in words if dictionary.index(word) == dictionary.unk())
    if unknown:
        shown = listed(unknown, 5)
        print(printable(f"warning: read as {dictionary.unk_word}: {shown}"), file=sys.stderr)
    with arguments_as_flags(top="--top", gaps="--largest-gaps"):
        found = compare_next_words(
            list(zip(labels, models)), sentences, args.top, args.largest_gaps
        )
    print(json.dumps({"places": found}) if args.format == "json" else printable(as_text(found)))
    return 0


def as_text(places: Sequence[Dict[str, Any]]) -> str:
    """The positions as plain text, one paragraph each."""
    parts = []
    for number, place in enumerate(places, 1):
        width = max(len(one["label"]) for one in place["models"])
        lines = [f"{number}  {place['context']} __?__".replace("  __", " __")]
        for one in place["models"]:
            listed = "  ".join(f"{each['word']} {each['probability']:.2f}" for each in one["next"])
            lines.append(f"   {one['label']:<{width}}  {listed}")
        if place["reference"] is not None:
            true = "  ".join(f"{one['label']} {one['reference']:.2g}" for one in place["models"])
            lines.append(f"   next word: {place['reference']}  ({true})")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "The first model is ahead nowhere."
