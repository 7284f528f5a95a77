"""Analysis from Python: one function, and the report that it returns; the command line uses both.

from spectral_fairseq.analysis import analyze

report = analyze("model.safetensors")
print(report)
report.to_dict()["checkpoints"][0]["measures"]["mean_cosine"]
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from spectral_fairseq.analysis.drawing import Picture, import_matplotlib
from spectral_fairseq.analysis.options import Options, StepCallback
from spectral_fairseq.analysis.plots import draw_all
from spectral_fairseq.analysis.report import as_html
from spectral_fairseq.analysis.results import (
    Analysed,
    analyse_model,
    document,
    labels_for,
)
from spectral_fairseq.analysis.results_folder import PAGE, check_folder, write_results
from spectral_fairseq.analysis.text import as_summary, as_text
from spectral_fairseq.errors import ConfigurationError, check_count, check_enough, missing_package
from spectral_fairseq.formats.counts import Counts
from spectral_fairseq.functional.settings import new_tensors_on


def analyze(
    *models: Any,
    table: Optional[str] = None,
    dictionary: Optional[Union[str, Path]] = None,
    counts: Optional[Union[str, Path, Counts]] = None,
    labels: Optional[Sequence[str]] = None,
    progress: Optional[Callable[[int], StepCallback]] = None,
    verify: bool = True,
    **options: Any,
) -> Report:
    """Measure the embedding tables of models.

    Args:
        models: each a path, of a file in one of the formats of :mod:`spectral_fairseq.formats` or
            of a model's folder, or a model in memory (a tensor or an array of shape (N, d), a
            state dict, a ``torch.nn.Module``). Nothing in a file is executed, and models in memory
            are not changed.
        table: name of the table, or a part of it that fits only one; the output table if not given.
        dictionary: dict.txt, tokenizer.json, vocab.json, vocab.txt, a sentencepiece model, or a
            folder with one of them; looked for beside the model if not given.
        counts: how often each word occurs: a file with lines "<word> <count>", a mapping from
            words to counts, or one number for each row.
        labels: different names, one for each model; made from the paths if not given.
        progress: called with the number of each model from 0 on; the result follows its steps.
        verify: compare the bytes of a file with the checksums in it, if it has any; reading all of
            a huge file takes time.
        **options: the fields of :class:`spectral_fairseq.analysis.options.Options`, such as
            ``words=("the",)`` for the nearest neighbours of a word, or ``seed``.

    Returns:
        The report.

    Raises:
        CheckpointError: a file is missing, damaged or of no known format, or its table is not
            found.
        DataError: a table, dictionary or counts that cannot be used.
        ConfigurationError: an impossible option, or a package that is not installed.
        TypeError: an option that does not exist.
    """
    remedy = "Pass a path or a model."
    check_enough(len(models), 1, "model to analyse", remedy, ConfigurationError)
    chosen = Options(**options)
    analysed: List[Analysed] = []
    for index, (model, label) in enumerate(zip(models, labels_for(models, labels))):
        with new_tensors_on("cpu"):  # where tables are measured
            analysed_model = analyse_model(
                model,
                chosen,
                label=label,
                table=table,
                dictionary=dictionary,
                counts=counts,
                progress=None if progress is None else progress(index),
                verify=verify,
            )
        analysed.append(analysed_model)
    return Report(analysed, chosen)


_log = logging.getLogger(__name__)
_unmeasured: Set[Tuple[str, str]] = set()


def training_measures(model: Any, **options: Any) -> Dict[str, float]:
    """The measures of one model for a callback, which ends no training and waits for no process.

    Args:
        model: as for :func:`analyze`.
        **options: of :func:`analyze`.

    Returns:
        Key -> number; empty where the table cannot be measured. The reason is logged once, as a
        warning that names the model.
    """
    try:
        return analyze(model, **options).scalars()
    except Exception as error:
        # The found numbers, such as those of rows that are not finite, change in each step.
        reason = getattr(error, "expected", type(error).__name__)
        cause = type(model).__name__, str(reason)
        if cause not in _unmeasured:
            _unmeasured.add(cause)
            _log.warning("The table of %s is not measured: %s", cause[0], error)
        return {}


class Report:
    """The measures of one table or several, ready for programs, terminals, notebooks and pages.

    Attributes:
        analysed: the results of each model.
        options: what was sampled, and how.
        command: which subcommand the document names as its origin.
    """

    def __init__(self, analysed: Sequence[Analysed], options: Options) -> None:
        self.analysed: List[Analysed] = list(analysed)
        self.options = options
        self.command = "analyze"

    def extend(self, index: int, measures: Mapping[str, Optional[float]], **entries: Any) -> None:
        """Add measures of something else than the table, such as predictions.

        Args:
            index: of the model.
            measures: key of the catalogue -> value, or None where it does not apply.
            **entries: further entries of the model in the document.
        """
        result = self.analysed[index].result
        result["measures"].update(measures)
        result.update(entries)
        on_data, nbest = entries.get("outputs"), entries.get("nbest")
        if on_data:
            name = Path(on_data["data"]).name
            result["signature"] += f"|data:{name}:{on_data['subset']}:{on_data['tokens']}"
        if nbest:
            result["signature"] += f"|nbest:{Path(nbest['file']).name}:{nbest['signature']}"

    def to_dict(self) -> Dict[str, Any]:
        """The document that ``--format json`` prints."""
        return document(self.command, self.analysed, self.options)

    def scalars(self) -> Dict[str, float]:
        """The measures of the only model that apply to it, for loggers: key -> number.

        Raises:
            ConfigurationError: there are several models.
        """
        remedy = "Use to_dict() or to_frame()."
        check_count(len(self.analysed), 1, "model in the report, for scalars()", remedy)
        (checkpoint,) = self.to_dict()["checkpoints"]
        return {key: value for key, value in checkpoint["measures"].items() if value is not None}

    def to_frame(self) -> Any:
        """The measures as a ``pandas.DataFrame``: one row a model, one column a measure.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise missing_package("pandas", "for to_frame()") from error
        checkpoints = self.to_dict()["checkpoints"]
        labels = pandas.Index([checkpoint["label"] for checkpoint in checkpoints], name="model")
        return pandas.DataFrame(
            [checkpoint["measures"] for checkpoint in checkpoints], index=labels, dtype=float
        )

    def figures(self) -> Dict[str, Any]:
        """The pictures as figures of matplotlib, by their names, for notebooks and loggers.

        pyplot does not manage them, so they need not be closed.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        return {picture.name: picture.figure() for picture in self.pictures()}

    def pictures(self) -> List[Picture]:
        """The pictures as they stand in the HTML report.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        import_matplotlib()
        return draw_all(self.to_dict(), self.analysed)

    def to_html(self) -> str:
        """The page that ``--out`` writes: one document that needs no network."""
        return as_html(self.to_dict(), self.pictures())

    def write(self, folder: Union[str, Path], overwrite: bool = False) -> Path:
        """Write the page, the pictures and the document into a folder.

        Args:
            folder: to be made, or empty.
            overwrite: replace a report that is there already.

        Returns:
            The page.

        Raises:
            ConfigurationError: a folder that cannot be used, or matplotlib is not installed.
            OutputError: the system did not write all of it.
        """
        out = check_folder(folder, overwrite)
        write_results(out, self.to_dict(), self.pictures())
        return out / PAGE

    def to_text(self) -> str:
        """All measures, as ``--all`` prints them."""
        return as_text(self.to_dict())

    def __str__(self) -> str:
        return as_summary(self.to_dict())
