"""What became of the embedding tables and of the translations, as figures."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List

import torch

import spectral_fairseq
from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.functional.linalg.row_norms import rms_row_norm
from spectral_fairseq.functional.linalg.singular_values import right_singular_system
from spectral_fairseq.functional.measures.effective_rank import effective_rank
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine
from spectral_fairseq.functional.measures.partition_function import (
    isotropy_i1,
    isotropy_i2,
    log_partition,
)

PACKAGES = ("torch", "fairseq", "ve-fairseq", "numpy", "sentencepiece", "sacrebleu", "matplotlib")


def table_figures(checkpoint: Path, binary: Path) -> Dict[str, Any]:
    """Measures of a checkpoint's output table, over all words.

    Padding and fairseq's filler symbols are no words and are left out.

    Args:
        checkpoint: of either recipe.
        binary: fairseq's data folder, with the dictionaries.
    """
    from fairseq import checkpoint_utils

    from spectral_fairseq.plugin.criterions.output_table import factored_table, output_table
    from spectral_fairseq.plugin.models.tables import uncounted_rows

    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(binary)}
    )
    table = output_table(models[0], len(task.target_dictionary)).detach()
    counted = torch.ones(len(table), dtype=torch.bool)
    counted[uncounted_rows(task.target_dictionary)] = False
    table = table[counted]

    sigma, directions = right_singular_system(table)
    figures: Dict[str, Any] = {
        "words": len(table),
        "dimensions": table.size(1),
        "mean_cosine": mean_cosine(table),
        "rms_row_norm": rms_row_norm(table),
        "sigma_last_to_first": float(sigma[-1] / sigma[0]),
        "effective_rank": effective_rank(sigma),
        "singular_values": [round(value, 6) for value in sigma.tolist()],
    }
    for convention, scale in (("as_is", 1.0), ("unit_rms_rows", 1 / rms_row_norm(table))):
        log_z = log_partition(table, directions, scale=scale)
        figures[f"isotropy_{convention}"] = {
            "I1_both_signs": float(isotropy_i1(log_z)),
            "I2_both_signs": float(isotropy_i2(log_z)),
            "I1_one_sign": float(isotropy_i1(log_z[0])),
            "I2_one_sign": float(isotropy_i2(log_z[0])),
        }
    factored = factored_table(models[0])
    if isinstance(factored, SVDEmbedding):
        figures["prior"] = [round(value, 6) for value in factored.prior().tolist()]
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
    """Versions of all that could change a figure."""
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
