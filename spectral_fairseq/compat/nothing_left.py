"""Nothing that the model can read.

Sentences and pieces of text that are longer than the model's positions are skipped: always in
training, with --skip-invalid-size-inputs-valid-test elsewhere. fairseq-eval-lm cuts a text into
pieces of --tokens-per-sample, 1,024 by default: of a model of 512 all but the last one are
skipped. Where nothing is left, fairseq-eval-lm prints "Evaluated 0 tokens" and the perplexity 1,
fairseq-generate and -validate divide by zero, and a training has epochs without an update.
"""

from __future__ import annotations

from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.errors import DataError, plainly


def is_split(task: Any, dataset: Any) -> bool:
    """Whether a task has loaded a data set as a split, or what it is a window on.

    The lines of a running translation, of fairseq-interactive or the hub, are none: where all of
    them are skipped, the next ones follow.
    """
    within = getattr(dataset, "dataset", None)  # of fairseq-eval-lm --context-window
    return any(split is dataset or split is within for split in task.datasets.values())


@wrapping
def refuse_nothing(
    self: Any,
    indices: Any,
    dataset: Any,
    max_positions: Any = None,
    *args: Any,
    original: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """Wrap the ``filter_indices_by_size`` of tasks, so that it refuses to skip a whole split."""
    kept = original(self, indices, dataset, max_positions, *args, **kwargs)
    if len(kept) > 0 or len(indices) == 0 or not is_split(self, dataset):
        return kept
    size = plainly(dataset.size(indices[0]))
    raise DataError(
        "text in pieces that the model can read",
        f"{len(indices):,}, all skipped, such as one of {size} tokens; the model reads "
        f"{plainly(max_positions)}",
        "Cut the text into shorter pieces: sentences, or --tokens-per-sample of a language model "
        "(less --context-window, if any).",
    )


NOTHING_LEFT = Patch(
    name="nothing left",
    reason="Where every sentence is longer than the model reads and is skipped, fairseq-eval-lm "
    "prints the perplexity 1, fairseq-generate and fairseq-validate divide by zero, and "
    "fairseq-train goes through its epochs without an update.",
    install=replaces(
        {"fairseq.tasks.fairseq_task:FairseqTask.filter_indices_by_size": refuse_nothing}
    ),
)
