"""The same checkpoint translated by bare fairseq, with the plugin, and by CTranslate2 after export.

    python -m benchmarks.bench_ctranslate2 CHECKPOINT DATA [--subset test] [--turns N]

CHECKPOINT is a Transformer for translation and DATA the folder that fairseq-preprocess made. All
translate the same batches with the same beam in one process, A B A B, so that only the search is
timed; start-up, export and scoring are not. BLEU is sacreBLEU's, after the marks of
``--post-process`` are taken away.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import statistics
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List

import sacrebleu
import torch
from fairseq import checkpoint_utils
from fairseq.data.data_utils import post_process
from fairseq.dataclass.configs import GenerationConfig
from fairseq.sequence_generator import SequenceGenerator
from fairseq.utils import strip_pad

import spectral_fairseq.plugin  # noqa: F401  (registers with fairseq)
from benchmarks.harness import median_ratio, paired_times, positive, print_result, print_table
from spectral_fairseq.commands.main import main as spectral_fairseq_command

Lines = Dict[int, str]
Search = Callable[..., Any]


def text_of(words: Any, tokens: torch.Tensor) -> str:
    """The words of a sentence of a batch, without what fills it up."""
    return str(words.string(strip_pad(tokens, words.pad())))


class Translations:
    """The batches of a data set, and what each alternative makes of them.

    Args:
        task: of the checkpoint, with its dictionaries.
        args: of the command line.
    """

    def __init__(self, task: Any, args: argparse.Namespace) -> None:
        self.task, self.beam = task, args.beam
        task.load_dataset(args.subset)
        batches = task.get_batch_iterator(task.dataset(args.subset), max_sentences=args.sentences)
        self.batches = list(batches.next_epoch_itr(shuffle=False))
        self.found: Dict[str, Lines] = {}
        self.references: Lines = {}
        for batch in self.batches:
            for index, target in zip(batch["id"].tolist(), batch["target"]):
                self.references[index] = text_of(task.target_dictionary, target)

    def by_fairseq(self, name: str, model: Any, search: Search) -> Callable[[], None]:
        """Translate all batches by a model and a form of fairseq's search."""
        generator = self.task.build_generator([model], GenerationConfig(beam=self.beam))
        words = self.task.target_dictionary

        @torch.no_grad()
        def run() -> None:
            lines = self.found[name] = {}
            for batch in self.batches:
                for index, best in zip(batch["id"].tolist(), search(generator, [model], batch)):
                    lines[index] = text_of(words, best[0]["tokens"])

        return run

    def by_ctranslate2(self, name: str, folder: Path) -> Callable[[], None]:
        """Translate all batches by an exported model."""
        import ctranslate2

        translator = ctranslate2.Translator(str(folder), intra_threads=torch.get_num_threads())
        words = self.task.source_dictionary
        sources: List[Dict[int, List[str]]] = [
            {
                index: text_of(words, source).split()
                for index, source in zip(batch["id"].tolist(), batch["net_input"]["src_tokens"])
            }
            for batch in self.batches
        ]

        def run() -> None:
            lines = self.found[name] = {}
            for batch in sources:
                results = translator.translate_batch(
                    list(batch.values()), beam_size=self.beam, max_decoding_length=200
                )
                for index, result in zip(batch, results):
                    lines[index] = " ".join(result.hypotheses[0])

        return run

    def bleu(self, name: str, symbol: str) -> float:
        """SacreBLEU of what an alternative has found, without the marks of subwords."""
        hypotheses, references = (
            [post_process(lines[index], symbol) for index in sorted(self.references)]
            for lines in (self.found[name], self.references)
        )
        return sacrebleu.corpus_bleu(hypotheses, [references]).score

    def equal(self, name: str, other: str) -> float:
        """The share of translations that two alternatives have in common, word for word."""
        one, two = self.found[name], self.found[other]
        return sum(one[index] == two[index] for index in one) / len(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--subset", default="test")
    parser.add_argument("--sentences", type=positive, default=64, help="of a batch")
    parser.add_argument("--beam", type=positive, default=5)
    parser.add_argument("--turns", type=positive, default=3)
    parser.add_argument("--post-process", default="sentencepiece", help="as of fairseq-generate")
    parser.add_argument("--bf16", action="store_true", help="with the plugin in bfloat16 too")
    args = parser.parse_args()
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(args.checkpoint)], arg_overrides={"data": str(args.data)}
    )
    translations = Translations(task, args)
    ours = SequenceGenerator.generate
    bare = "bare fairseq"
    model.eval()
    alternatives = {
        bare: translations.by_fairseq(bare, model, inspect.unwrap(ours)),
        "with the plugin": translations.by_fairseq("with the plugin", model, ours),
    }
    if args.bf16:
        name, half = "with the plugin, --bf16", copy.deepcopy(model).bfloat16()
        alternatives[name] = translations.by_fairseq(name, half, ours)
    with tempfile.TemporaryDirectory() as work:
        for kind in ("float32", "int8"):
            name, folder = f"CTranslate2, {kind}", Path(work) / kind
            export = ["export", "--to", "ctranslate2", "--quantization", kind]
            export += ["--data", str(args.data), str(args.checkpoint), str(folder)]
            if spectral_fairseq_command(export):
                parser.error(f"{args.checkpoint} cannot be exported to CTranslate2 (above)")
            alternatives[name] = translations.by_ctranslate2(name, folder)
        times = paired_times(alternatives, args.turns)
    rows = [
        {
            "translated by": name,
            "sentences/s": len(translations.references) / statistics.median(seconds),
            f"time over {bare}": median_ratio(seconds, times[bare]),
            f"as {bare}": translations.equal(name, bare),
            "BLEU": translations.bleu(name, args.post_process),
        }
        for name, seconds in times.items()
    ]
    print_table(rows)
    print_result("ctranslate2", beam=args.beam, sentences=args.sentences, rows=rows)


if __name__ == "__main__":
    main()
