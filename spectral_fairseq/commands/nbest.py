"""Precision and recall of smoothed sentence-level BLEU over n-best lists, for ``analyze --nbest``.

Yang et al., ICLR 2018 (https://arxiv.org/abs/1711.03953), table 4, after Zhao, Zhao, Eskenazi,
ACL 2017 (https://aclanthology.org/P17-1061), section 5.2. For a context with references r_1..r_M
and hypotheses h_1..h_N,

    precision = 1/N sum_i max_j BLEU(r_j, h_i),      recall = 1/M sum_j max_i BLEU(r_j, h_i),

averaged over contexts. BLEU-n is sacrebleu's sentence BLEU up to n-grams of order n, smoothed
(``exp``, method 3 of Chen and Cherry 2014, https://aclanthology.org/W14-3346), as a fraction.
``effective_order`` leaves out orders longer than the sentence.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from spectral_fairseq.analysis.options import StepCallback
from spectral_fairseq.errors import (
    ConfigurationError,
    DataError,
    check_choice,
    first_line,
    needs_extra,
)
from spectral_fairseq.files import check_file, read_text

ORDERS = (1, 2, 3, 4)


def nbest_bleu(
    contexts: Sequence[Tuple[Sequence[str], Sequence[str]]],
    tokenize: str = "none",
    progress: Optional[StepCallback] = None,
) -> Tuple[Dict[str, float], str]:
    """Precision and recall for every order of :data:`ORDERS`.

    Args:
        contexts: for each, its references and its hypotheses, none of the two empty.
        tokenize: sacrebleu's tokeniser; ``none`` for text that is tokenised already.
        progress: advanced by one for each context and order.

    Returns:
        ``bleu_<n>_precision`` and ``bleu_<n>_recall``, 0 to 1, and sacrebleu's signature.
    """
    with needs_extra("predictions", "for BLEU"):
        from sacrebleu.metrics import BLEU
    figures: Dict[str, float] = {}
    signature = ""
    for order in ORDERS:
        metric = BLEU(
            max_ngram_order=order,
            tokenize=tokenize,
            smooth_method="exp",
            effective_order=True,
            force=True,
        )
        precision = recall = 0.0
        for references, hypotheses in contexts:
            scores = [  # [hypotheses][references]
                [metric.sentence_score(h, [r]).score / 100 for r in references] for h in hypotheses
            ]
            precision += sum(map(max, scores)) / len(hypotheses)
            recall += sum(max(column) for column in zip(*scores)) / len(references)
            if progress is not None:
                progress.advance(1)
        figures[f"bleu_{order}_precision"] = precision / len(contexts)
        figures[f"bleu_{order}_recall"] = recall / len(contexts)
        signature = str(metric.get_signature())
    return figures, signature


def check_tokenizer(name: str) -> None:
    """Refuse a tokenizer that sacrebleu does not know, or whose package or model is missing."""
    with needs_extra("predictions", "for --nbest"):
        from sacrebleu.metrics import BLEU
    check_choice("--nbest-tokenize", name, sorted(set(BLEU.TOKENIZERS) - {None}))
    try:
        BLEU(tokenize=name)
    except Exception as error:  # whatever the package or the download of a model raises
        wanted = "a tokenizer of sacrebleu that can be used, for --nbest-tokenize"
        remedy = "Choose another, or install what it needs."
        raise ConfigurationError(wanted, first_line(error), remedy) from error


def read_generated(path: Union[str, Path]) -> List[Tuple[List[str], List[str]]]:
    """References and hypotheses of the output of ``fairseq-generate --nbest N``.

    Args:
        path: its stdout, or ``generate-<subset>.txt`` of ``--results-path``.

    Returns:
        For each sentence (its T lines, its H lines), in the order of sentence numbers.
    """
    file = Path(path)
    check_file(file, "the output of fairseq-generate", "Check the path.", DataError)
    text = read_text(file, DataError, "Check the path.")
    references: Dict[int, List[str]] = {}
    hypotheses: Dict[int, List[str]] = {}
    for line in text.split("\n"):  # splitlines() would end a line at U+2028 and others too
        match = re.match(r"([TH])-(\d+)\t(.*)$", line)
        if match is None:
            continue
        number, rest = int(match[2]), match[3]
        if match[1] == "T":
            references.setdefault(number, []).append(rest)
        else:
            hypotheses.setdefault(number, []).append(rest.partition("\t")[2])
    if not hypotheses or hypotheses.keys() != references.keys():
        raise DataError(
            f"lines T-<n> and H-<n> for every sentence in {file}",
            f"{len(references)} sentences with T lines, {len(hypotheses)} with H lines",
            "Give the output of fairseq-generate without --quiet, on data that have targets.",
        )
    return [(references[number], hypotheses[number]) for number in sorted(references)]


def bleu_details(contexts: Sequence[Tuple[Any, Any]], signature: str, path: Any) -> Dict[str, Any]:
    """The entry ``nbest`` of the document: the lists behind the scores."""
    sizes = [len(hypotheses) for _, hypotheses in contexts]
    return {
        "file": str(path),
        "sentences": len(contexts),
        "hypotheses": {"least": min(sizes), "most": max(sizes)},
        "references": max(len(references) for references, _ in contexts),
        "signature": signature,
    }
