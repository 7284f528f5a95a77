"""The loop of a study: train what is due, evaluate it, record it, and go on to the next stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Union

import torch

from benchmarks.harness import commit
from spectral_fairseq.errors import ConfigurationError
from studies.evidence.corpora import EvaluationSet, LanguageModelCorpus, TranslationCorpus
from studies.evidence.grid import REMOVED, Study
from studies.evidence.plan import Cell, Stage, stages
from studies.evidence.records import Records, records_of
from studies.evidence.scoring import perplexities, translation_scores
from studies.evidence.training import StudyRun
from studies.running import Job, JobFailed, run_jobs
from studies.training import scores, versions
from studies.work_folder import WorkDir

Corpus = Union[TranslationCorpus, LanguageModelCorpus]


class StudyRunner:
    """Trains, evaluates and records the trainings of a study.

    Args:
        study: the study.
        corpus: its text.
        work: receives checkpoints, logs and binary data; it can be removed afterwards.
        records: the results.
        device: ``cpu`` or ``cuda``.
        at_once: trainings side by side, with one thread each, on one GPU if there is one.
    """

    def __init__(
        self,
        study: Study,
        corpus: Corpus,
        work: WorkDir,
        records: Records,
        device: str,
        at_once: int,
    ) -> None:
        self.study, self.corpus, self.work, self.records = study, corpus, work, records
        self.device, self.at_once = device, at_once

    def run(self, methods: Sequence[str] = ()) -> None:
        """Everything that is not recorded yet, of some methods or of all.

        Raises:
            ConfigurationError: a method that the package no longer has is to be trained.
        """
        recorded = {record["method"] for record in self.records.values()}
        for method in methods or self.study.methods:
            if method in REMOVED and method not in recorded:
                raise ConfigurationError(
                    "methods that this version of the package has",
                    f"{method}, which commit {REMOVED[method]} has",
                    "Check out that commit, or name the other methods with --methods.",
                )
        torch.set_num_threads(1)
        for stage, _ in stages(self.study, self.records, methods):
            due = [cell for cell in stage.cells if cell.name not in self.records]
            done = len(stage.cells) - len(due)
            print(f"{stage.name}: {len(stage.cells)} trainings, {done} done before", flush=True)
            self._finish(stage, due)

    def _finish(self, stage: Stage, due: List[Cell]) -> None:
        tested = stage.name in ("seed", "simcut")
        runs = [
            StudyRun(self.study, cell, self.work, self.corpus.prepare(cell), self.device)
            for cell in due
        ]
        if tested and due and isinstance(self.corpus, TranslationCorpus):
            self._keep_test_set(self.corpus.set(due[0], "test"))
        # Few at a time, so that results come early and checkpoints do not pile up.
        for first in range(0, len(runs), 2 * self.at_once):
            some = runs[first : first + 2 * self.at_once]
            self._train(some)
            trained = [run for run in some if not run.diverged()]
            self._translate(trained, tested)
            if tested:
                self._jobs([run.analysis() for run in trained])
            for run in some:
                found = self._figures(run, tested) if run in trained else {"diverged": True}
                lines = None
                if run in trained and tested and isinstance(self.corpus, TranslationCorpus):
                    test = self.corpus.set(run.cell, "test")
                    lines = run.hypotheses(test, found["length_penalty"])
                self.records.add(run.cell, {"stage": stage.name, **found}, lines)
                for checkpoint in run.best.parent.glob("*.pt"):
                    checkpoint.unlink()

    def _train(self, runs: Sequence[StudyRun]) -> None:
        """Train until each run has come to its end or diverged."""
        while True:
            due = {run.label: run for run in runs if not (run.diverged() or run.is_trained())}
            if not due:
                return
            for run in due.values():
                run.keep_flags()
            try:
                self._jobs(
                    [run.training() for run in due.values()],
                    on_end=lambda job, usage, due=due: due[job.label].training_ended(usage),
                )
            except JobFailed:
                if not any(run.diverged() for run in due.values()):
                    raise
                # The others have been stopped, and go on from where they were.

    def _translate(self, runs: Sequence[StudyRun], tested: bool) -> None:
        jobs = [run.translation_of(text) for run in runs for text in self._texts(run, tested)]
        self._jobs(jobs)

    def _texts(self, run: StudyRun, tested: bool) -> List[EvaluationSet]:
        """What a model translates: the validation set and, for the tables, all test sets."""
        if not isinstance(self.corpus, TranslationCorpus):
            return []
        texts = [self.corpus.set(run.cell, "valid")]
        if tested:
            texts += [self.corpus.set(run.cell, "test"), *self.corpus.other_sets(run.cell)]
        return texts

    def _jobs(self, jobs: Sequence[Job], **options: Any) -> None:
        run_jobs(
            jobs,
            at_once=self.at_once,
            threads=1,
            gpu=self.device == "cuda",
            lock_fd=self.work.lock.fileno(),
            **options,
        )

    def _keep_test_set(self, test: EvaluationSet) -> None:
        self.records.keep_text("reference", test.lines("en"))
        # Some metrics, such as COMET, read the source as well.
        self.records.keep_text("source", test.lines("de"), "de")

    def _figures(self, run: StudyRun, tested: bool) -> Dict[str, Any]:
        """The figures of a training; those of the test set only if it stands in a table."""
        figures = {
            **(run.figures() if tested else run.training_figures()),
            "curve": run.curve(),
            "device": self.device,
            "versions": {**versions(), "commit": commit()},
            "resumed": run.times_resumed(),
            "at_once": self.at_once,
        }
        if isinstance(self.corpus, TranslationCorpus):
            valid, *tests = self._texts(run, tested)
            references = valid.lines("en")
            tried = {
                penalty: scores(run.hypotheses(valid, penalty), references)["bleu"]
                for penalty in self.study.length_penalties
            }
            penalty = max(tried, key=tried.__getitem__)
            bleu = tried[penalty]
            figures.update(valid_bleu=bleu, valid_score=bleu, length_penalty=penalty)
            training = self.corpus.set(run.cell, "train").lines("en") if tested else []
            found = {
                text.name: translation_scores(
                    run.hypotheses(text, penalty), text.lines("en"), training
                )
                for text in tests
            }
            figures.update(found.pop("test", {}))
            if found:
                figures["other_tests"] = found
        else:
            figures["valid_score"] = -figures["valid_ppl"]
            if tested:
                figures.update(perplexities(run.best, run.binary, "test"))
        return figures


def run_study(
    name: str,
    study: Study,
    corpus: Corpus,
    *,
    work_dir: Path,
    results: Path,
    device: str,
    at_once: int,
    methods: Sequence[str] = (),
) -> Records:
    """Run a study to its end, or as far as an interruption lets it; returns its records.

    Raises:
        ConfigurationError: the folders belong to a study of another text or other flags.
    """
    work = WorkDir(work_dir)
    with work.locked():
        records = records_of(results, name, study)
        records.keep_settings({"flags": study.flags, **corpus.settings()})
        StudyRunner(study, corpus, work, records, device, at_once).run(methods)
    return records
