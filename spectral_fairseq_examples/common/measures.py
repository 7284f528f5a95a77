"""Figures of a trained model: its scores, its embedding table, the versions they depend on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List

import torch

import spectral_fairseq
from spectral_fairseq_examples.common.jobs import json_document

PACKAGES = ("torch", "fairseq", "ve-fairseq", "numpy", "sentencepiece", "sacrebleu", "matplotlib")


def analyze_command(checkpoint: Path, binary: Path) -> List[str]:
    """``spectral-fairseq analyze`` on a checkpoint, printing JSON.

    Args:
        checkpoint: of any recipe.
        binary: fairseq's data folder, with the dictionaries.
    """
    command = ["spectral-fairseq", "analyze", str(checkpoint), "--dict", str(binary)]
    return [*command, "--format", "json", "--no-progress"]


def table_figures(log: Path) -> Dict[str, Any]:
    """Measures of the table of word vectors, from the output of :func:`analyze_command`.

    They are taken over all words; padding and fairseq's filler symbols are left out.
    """
    (found,) = json_document(log)["checkpoints"]
    measures = found["measures"]
    figures: Dict[str, Any] = {
        "words": found["table"]["words"],
        "dimensions": found["table"]["dimensions"],
        "mean_cosine": measures["mean_cosine"],
        "sigma_last_to_first": measures["sigma_min"] / measures["sigma_max"],
        "effective_rank": measures["effective_rank"],
        "singular_values": [round(value, 6) for value in found["singular_values"]],
        "isotropy_as_is": {
            "I1_both_signs": measures["i1"],
            "I2_both_signs": measures["i2"],
            "I1_one_sign": measures["i1_one_sign"],
            "I2_one_sign": measures["i2_one_sign"],
        },
        "isotropy_unit_rms_rows": {
            "I1_both_signs": measures["i1_unit_scale"],
            "I2_both_signs": measures["i2_unit_scale"],
        },
    }
    if found.get("prior"):
        figures["prior"] = [round(value, 6) for value in found["prior"]]
    return figures


def scores(hypotheses: List[str], references: List[str]) -> Dict[str, Any]:
    """SacreBLEU and chrF, each with its signature."""
    from sacrebleu.metrics import BLEU, CHRF

    result: Dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        score = metric.corpus_score(hypotheses, [references])
        result[name] = round(score.score, 2)
        result[f"{name}_signature"] = f"{score.name}|{metric.get_signature()}"
    return result


def versions() -> Dict[str, str]:
    """Versions of everything that could change a figure."""
    found = {
        "spectral_fairseq": spectral_fairseq.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": str(os.cpu_count()),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found
