"""``spectral-fairseq score``: BLEU of files, with the options of ``fairseq-score``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List

from spectral_fairseq.commands.shared import import_plugin, text_with_sentences
from spectral_fairseq.errors import DataError, check_enough, needs_extra
from spectral_fairseq.options import option

DESCRIPTION = """\
BLEU of translations against references, line by line, with the options of fairseq-score, which
takes no --user-dir and fails with --sacrebleu and --sentence-bleu. Without these two, the words of
both files are compared as they are, as fairseq-generate does for its last line.
Example: spectral-fairseq score --sys out.txt --ref test.de --sacrebleu
"""

_WORDS = "Leave out this pair of lines, or correct them."


@dataclass
class Arguments:
    """The arguments of ``score``."""

    sys: str = option(
        "-", "translations, one a line (default: standard input)", alias="-s", metavar="FILE"
    )
    ref: str = option("", "references, one a line", alias="-r", metavar="FILE", required=True)
    order: int = option(
        4, "longest n-grams that are counted", alias="-o", metavar="N", at_least=1, at_most=4
    )
    ignore_case: bool = option(False, "lower the case of both texts")
    sacrebleu: bool = option(False, "score with sacrebleu, which tokenises", exclusive_group="kind")
    sentence_bleu: bool = option(
        False,
        "BLEU of each sentence; n-grams of two and more words count one more",
        exclusive_group="kind",
    )


def run(args: Arguments) -> int:
    """Print the scores; returns the exit status 0."""
    translations, references = _lines(args.sys, "--sys"), _lines(args.ref, "--ref")
    if len(translations) != len(references):
        found = f"{len(translations):,} and {len(references):,}"
        remedy = "Give the translations in the order of the references, one a line."
        raise DataError(f"as many lines in {args.sys} as in {args.ref}", found, remedy)
    if args.ignore_case:
        translations = [line.lower() for line in translations]
        references = [line.lower() for line in references]
    if args.sacrebleu:
        print(_sacrebleu(translations, references, args.order))
        return 0
    for result in _fairseq_bleu(translations, references, args.order, args.sentence_bleu):
        print(result)
    return 0


def _lines(name: str, flag: str) -> List[str]:
    text = text_with_sentences(name, flag)
    lines = text.split("\n")
    lines = lines if lines[-1] else lines[:-1]
    check_enough(len(text.split()), 1, f"word in {name}", f"Correct {flag}.")
    return lines


def _sacrebleu(translations: List[str], references: List[str], order: int) -> str:
    with needs_extra("predictions", "for BLEU"):
        from sacrebleu.metrics import BLEU
    return str(BLEU(max_ngram_order=order).corpus_score(translations, [references]))


def _fairseq_bleu(
    translations: List[str], references: List[str], order: int, each: bool
) -> Iterator[str]:
    import_plugin()
    from fairseq.data import Dictionary
    from fairseq.scoring.bleu import BleuConfig, Scorer

    words = Dictionary()
    scorer = Scorer(BleuConfig(pad=words.pad(), eos=words.eos(), unk=words.unk()))
    for number, pair in enumerate(zip(translations, references)):
        if each:
            fewest = min(len(line.split()) for line in pair)
            check_enough(fewest, 1, f"word in line {number + 1} of both texts", _WORDS)
            scorer.reset(one_init=True)
        translation, reference = (words.encode_line(line) for line in pair)
        scorer.add(reference, translation)
        if each:
            yield f"{number} {scorer.result_string(order)}"
    if not each:
        yield scorer.result_string(order)
