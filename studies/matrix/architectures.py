"""Each model and task of fairseq that can be built: an update, and what evaluates it.

    python -m pip install soundfile
    python -m studies.matrix.architectures [MODEL ...] [--work-dir DIR] [--seconds N]

Every model is trained for one update on tiny random data; fairseq-generate, fairseq-interactive
and fairseq-validate (fairseq-eval-lm for language models) then take the checkpoint. All of it is
done by bare fairseq and with the plugin, in forks of one process. A command passes that ends with
status 0; where it does on both sides, the numbers and words that it prints are compared. The result
is written into architectures.json and docs/compatibility.md, model by model, so that an interrupted
run goes on.

Bare fairseq may load its checkpoints whatever torch's version is
(``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``): otherwise none of its commands would go on under current
torch, and nothing could be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from spectral_fairseq.provenance import versions
from studies.matrix.page import PAGE
from studies.work_folder import alone_with, write_text

RECORD = Path(__file__).with_name("architectures.json")
COMMANDS = ("train", "generate", "interactive", "validate")
SECONDS = 120
Record = Dict[str, Any]
_BLOCK = re.compile(r"<!-- architectures -->.*<!-- /architectures -->", re.DOTALL)


class Model(NamedTuple):
    """How a model is trained and evaluated.

    Args:
        arch: of fairseq.
        task: of fairseq, with the flags that it needs everywhere.
        flags: sizes and the criterion, for training.
        data: the folder that holds what it reads.
        evaluation: further flags of the commands that evaluate.
    """

    arch: str
    task: str
    flags: str
    data: str = "translation"
    evaluation: str = ""


def _sizes(*sides: str) -> str:
    each = "--{0}-layers 1 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32 --{0}-attention-heads 2"
    return " ".join(each.format(side) for side in sides)


_BOTH, _ENCODER, _DECODER = _sizes("encoder", "decoder"), _sizes("encoder"), _sizes("decoder")
_PAIR = "--task translation -s de -t en"
_PAIR_LEVENSHTEIN = "--task translation_lev -s de -t en"
_TEXT = "--task language_modeling --tokens-per-sample 24"
_MASKED = "--task masked_lm --tokens-per-sample 24"
_SPEECH = "--task speech_to_text --config-yaml config.yaml"
_SPEECH_LOSS = "--criterion label_smoothed_cross_entropy"
_ADAPTIVE = "--criterion adaptive_loss --ddp-backend legacy_ddp"
_FEATURES = "--conv-feature-layers [(16,10,5),(16,3,2)] --encoder-layers 1 --encoder-embed-dim 16 "
_WAV2VEC2 = (
    f"{_FEATURES} --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --final-dim 16 "
    "--conv-pos 4 --conv-pos-groups 2 --mask-length 2"
)
_CONVOLUTIONS = "--{0}-conv-dim 16 --{0}-kernel-size-list [3]"
_LIGHT = " ".join(_CONVOLUTIONS.format(side) for side in ("encoder", "decoder"))
_RECURRENT = (
    "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-hidden-size 16 "
    "--decoder-hidden-size 16 --decoder-out-embed-dim 16"
)
_CONVOLVED = (
    "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-layers [(16,3)] "
    "--decoder-layers [(16,3)] --decoder-out-embed-dim 16"
)
_LEV_NAMES = (
    *("cmlm_transformer", "insertion_transformer", "iterative_nonautoregressive_transformer"),
    *("levenshtein_transformer", "nacrf_transformer", "nonautoregressive_transformer"),
)
_NOISE = {
    "levenshtein_transformer": "random_delete",
    "insertion_transformer": "random_delete",
    "cmlm_transformer": "random_mask",
}
_FLAGS = {"nacrf_transformer": "--crf-lowrank-approx 8 --crf-beam-approx 8"}

MODELS: Dict[str, Model] = {
    "transformer": Model("transformer", _PAIR, _BOTH),
    "transformer, shared table": Model("transformer", _PAIR, f"{_BOTH} --share-all-embeddings"),
    "transformer, adaptive softmax": Model(
        *("transformer", _PAIR, f"{_BOTH} --adaptive-softmax-cutoff 10,20 {_ADAPTIVE}"),
    ),
    "transformer_align": Model("transformer_align", _PAIR, _BOTH),
    "lstm": Model("lstm", _PAIR, _RECURRENT),
    "fconv": Model("fconv", _PAIR, _CONVOLVED),
    "fconv_self_att": Model(
        "fconv_self_att",
        _PAIR,
        "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-layers [(16,3)] "
        "--decoder-layers [(16,3)] --decoder-out-embed-dim 16 --multihead-attention-nheads 2 "
        "--multihead-self-attention-nheads 2 --encoder-attention-nheads 2",
    ),
    "lightconv": Model("lightconv", _PAIR, f"{_BOTH} {_LIGHT}"),
    "bart": Model("bart_base", _PAIR, f"{_BOTH} --share-all-embeddings"),
    "bart, task of mBART": Model(
        "mbart_base",
        "--task translation_from_pretrained_bart -s de -t en --langs de,en --prepend-bos",
        f"{_BOTH} --share-all-embeddings",
    ),
    "multilingual_transformer": Model(
        "multilingual_transformer",
        "--task multilingual_translation --lang-pairs de-en",
        _BOTH,
        "translation",
        "-s de -t en",
    ),
    "transformer, many languages": Model(
        "transformer",
        "--task translation_multi_simple_epoch --lang-pairs de-en --langs de,en",
        _BOTH,
        "translation",
        "-s de -t en",
    ),
    **{
        name: Model(
            name,
            f"{_PAIR_LEVENSHTEIN} --noise {_NOISE.get(name, 'full_mask')}",
            f"{_BOTH} --criterion nat_loss --share-all-embeddings {_FLAGS.get(name, '')}",
            "translation",
            "--iter-decode-max-iter 2 --beam 1",
        )
        for name in _LEV_NAMES
    },
    "transformer_lm": Model("transformer_lm", _TEXT, _DECODER, "text"),
    "transformer_lm, adaptive": Model(
        "transformer_lm",
        _TEXT,
        f"{_DECODER} --adaptive-input --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff "
        f"10,20 --decoder-input-dim 16 --decoder-output-dim 16 {_ADAPTIVE}",
        "text",
    ),
    "lstm_lm": Model(
        "lstm_lm",
        _TEXT,
        "--decoder-embed-dim 16 --decoder-hidden-size 16 --decoder-out-embed-dim 16",
        "text",
    ),
    "fconv_lm": Model(
        "fconv_lm", _TEXT, "--decoder-embed-dim 16 --decoder-layers [(16,3)]", "text"
    ),
    "lightconv_lm": Model(
        *("lightconv_lm", _TEXT, f"{_DECODER} --decoder-kernel-size-list [3]", "text"),
    ),
    "hf_gpt2": Model("hf_gpt2", _TEXT, "--embed-dim 16 --num-attention-heads 2", "text"),
    "roberta": Model("roberta_base", _MASKED, f"{_ENCODER} --criterion masked_lm", "text"),
    "roberta, untied": Model(
        "roberta_base",
        _MASKED,
        f"{_ENCODER} --criterion masked_lm --untie-weights-roberta",
        "text",
    ),
    "masked_lm": Model(
        "masked_lm",
        "--task legacy_masked_lm --tokens-per-sample 24",
        f"{_ENCODER} --criterion legacy_masked_lm_loss",
        "text",
    ),
    "bart, denoising": Model(
        "bart_base",
        "--task denoising --tokens-per-sample 24 --mask-length span-poisson --mask 0.3 "
        "--replace-length 1",
        f"{_BOTH} --share-all-embeddings",
        "text",
    ),
    "s2t_transformer": Model(
        "s2t_transformer_s",
        _SPEECH,
        f"{_BOTH} --conv-channels 16 {_SPEECH_LOSS}",
        "speech",
    ),
    "s2t_berard": Model(
        "s2t_berard",
        _SPEECH,
        "--in-channels 1 --output-layer-dim 16 --decoder-num-layers 1 --decoder-embed-dim 16 "
        "--decoder-hidden-dim 32 --attention-dim 16 --lstm-size 16 --num-blstm-layers 1 "
        f"--input-layers [16,16] --conv-layers [[16,3,1],[16,3,1]] {_SPEECH_LOSS}",
        "speech",
    ),
    "s2t_conformer": Model(
        "s2t_conformer",
        _SPEECH,
        f"{_BOTH} --conv-channels 16 --input-feat-per-channel 16 {_SPEECH_LOSS}",
        "speech",
    ),
    "convtransformer": Model(
        "convtransformer",
        _SPEECH,
        f"{_BOTH} --input-feat-per-channel 16 --conv-out-channels 16 {_SPEECH_LOSS}",
        "speech",
    ),
    "wav2vec": Model(
        "wav2vec",
        "--task audio_pretraining",
        "--criterion wav2vec --conv-feature-layers [(16,10,5),(16,3,2)] "
        "--conv-aggregator-layers [(16,2,1)] --prediction-steps 2 --num-negatives 2",
        "recordings",
    ),
    "wav2vec2": Model(
        "wav2vec2",
        "--task audio_pretraining",
        f"{_WAV2VEC2} --criterion wav2vec --infonce --quantize-targets --latent-vars 4 "
        "--num-negatives 2",
        "recordings",
    ),
    "hubert": Model(
        "hubert",
        "--task hubert_pretraining --labels ['km'] --label-rate 1600 --pad-audio",
        f"{_WAV2VEC2} --criterion hubert --label-rate 1600",
        "recordings",
    ),
}
# What is registered and not tried: name -> why.
NOT_TRIED: Dict[str, str] = {
    **dict.fromkeys(
        ("camembert", "gottbert", "xlmr", "xmod"), "roberta under another name, or with adapters"
    ),
    **dict.fromkeys(
        (
            *("hubert_ctc", "hubert_seq2seq", "multires_hubert", "multires_hubert_ctc"),
            *("wav2vec2_laser", "wav2vec_classification", "wav2vec_ctc"),
            *("wav2vec_seq2seq", "xm_transformer", "unity_xm_transformer", "transformer_ulm"),
            *("speech_dlm", "s2spect_transformer", "s2spect_conformer", "s2spect2_conformer"),
            *("s2ut_transformer", "s2ut_conformer", "unity_conformer", "tts_transformer"),
            *("tacotron_2", "fastspeech2", "CodeHiFiGANVocoder"),
        ),
        "needs a vocoder or another trained model",
    ),
    **dict.fromkeys(
        ("model_parallel_roberta", "model_parallel_transformer", "model_parallel_transformer_lm"),
        "needs Megatron",
    ),
    "pipeline_parallel_transformer": "needs fairscale and GPUs",
    "transformer_from_pretrained_xlm": "needs a trained model of another kind",
    "roberta_enc_dec": "has no task of its own in fairseq",
    "dummy_model": "measures the speed of fairseq's trainer",
}


def make_data(folder: Path) -> None:
    """Write tiny random data: sentences of two languages, text, features of speech, recordings."""
    soundfile = importlib.import_module("soundfile")  # fairseq reads recordings with it
    preprocess = importlib.import_module("fairseq_cli.preprocess")
    rng, numbers = random.Random(1), np.random.default_rng(1)
    words = [f"w{index}" for index in range(30)]
    for language in ("de", "en"):
        lines = (" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(20))
        (folder / f"lines.{language}").write_text("\n".join(lines) + "\n", "utf-8")
    prefixes = [f"--{split}pref={folder / 'lines'}" for split in ("train", "valid", "test")]
    pair = ["-s", "de", "-t", "en", "--joined-dictionary", f"--destdir={folder / 'translation'}"]
    text = [prefix + ".de" for prefix in prefixes]
    text += ["--only-source", f"--destdir={folder / 'text'}"]
    for arguments in ([*pair, *prefixes], text):
        with mock_argv("fairseq-preprocess", arguments):
            preprocess.cli_main()
    speech = folder / "speech"
    speech.mkdir()
    (speech / "dict.txt").write_text("".join(f"{word} 9\n" for word in words), "utf-8")
    settings = ["vocab_filename: dict.txt", "input_feat_per_channel: 16", "input_channels: 1"]
    settings += ["use_audio_input: false", f"audio_root: {speech}"]
    (speech / "config.yaml").write_text("\n".join(settings) + "\n", "utf-8")
    rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
    for index in range(20):
        frames = rng.randint(40, 60)
        features = numbers.normal(size=(frames, 16)).astype(np.float32)
        np.save(speech / f"{index}.npy", features)
        said = " ".join(rng.choices(words, k=4))
        rows.append(f"{index}\t{index}.npy\t{frames}\t{said}\tone")
    for split in ("train", "valid", "test"):
        (speech / f"{split}.tsv").write_text("\n".join(rows) + "\n", "utf-8")
    recordings = folder / "recordings"
    recordings.mkdir()
    (recordings / "dict.km.txt").write_text("".join(f"{label} 9\n" for label in range(8)), "utf-8")
    lengths = [rng.randint(1600, 2400) for _ in range(20)]
    for index, length in enumerate(lengths):
        soundfile.write(recordings / f"{index}.wav", numbers.normal(0, 0.1, length), 16000)
    rows = [str(recordings), *(f"{index}.wav\t{length}" for index, length in enumerate(lengths))]
    labels = [" ".join(map(str, rng.choices(range(8), k=length // 10))) for length in lengths]
    for split in ("train", "valid", "test"):
        (recordings / f"{split}.tsv").write_text("\n".join(rows) + "\n", "utf-8")
        (recordings / f"{split}.km").write_text("\n".join(labels) + "\n", "utf-8")


@contextlib.contextmanager
def mock_argv(program: str, arguments: Sequence[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, [program, *arguments]
    try:
        yield
    finally:
        sys.argv = before


def arguments_of(model: Model, command: str, folder: Path, save: Path) -> Tuple[str, List[str]]:
    """The module of fairseq that runs a command, and its arguments."""
    data, path = str(folder / model.data), str(save / "checkpoint_last.pt")
    shared = [data, "--cpu", "--num-workers", "0", *model.task.split()]
    if command == "train":
        fixed = (
            "--optimizer adam --lr 1e-3 --max-update 1 --disable-validation --log-format simple "
            "--log-interval 1 --seed 1 --batch-size 8 --dropout 0 --required-batch-size-multiple 1"
        )
        sized = [*model.flags.split(), *fixed.split(), "--save-dir", str(save)]
        return "train", [*shared, "--arch", model.arch, *sized]
    few = ["--required-batch-size-multiple", "1", "--batch-size", "4", *model.evaluation.split()]
    search = ["--path", path, "--max-len-b", "8"]
    if "--beam" not in few:
        search += ["--beam", "2"]
    if command == "generate":
        return "generate", [*shared, *few, *search]
    if command == "interactive":
        source = ["--input", str(folder / "lines.de"), "--buffer-size", "4"]
        return "interactive", [*shared, *few, *search, *source]
    if model.task == _TEXT:
        return "eval_lm", [*shared, *few, "--path", path, "--gen-subset", "valid"]
    return "validate", [*shared, *_without_search(few), "--path", path, "--log-format", "simple"]


def _without_search(flags: List[str]) -> List[str]:
    """Flags that fairseq-validate has as well."""
    kept, skip = [], False
    for flag in flags:
        skip_this, skip = skip, flag in ("--beam", "--iter-decode-max-iter")
        if not skip_this and not skip:
            kept.append(flag)
    return kept


_NUMBERS = re.compile(
    r"^[HSTP]-\d+\t.*|(?<=valid \| ).*?(?= \| wps)|Loss \(base 2\): [\d.]+|(?<= loss=)[\d.]+",
    re.MULTILINE,
)


_ERRORS = re.compile(r"^(?:[\w-]+: )?[\w.]*(?:Error|Exception|error)\b.*", re.MULTILINE)


def run(module: str, arguments: List[str], seconds: int) -> Tuple[bool, str, List[str]]:
    """Run a command of fairseq in a fork.

    Returns:
        Whether it ends with status 0, what it says last, and the numbers and words that it prints.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        child = os.fork()
        if child == 0:
            _run_here(module, arguments, seconds, printed)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        text = printed.read()
    errors = _ERRORS.findall(text) or ["ended by a signal" if status < 256 else ""]
    return status == 0, errors[-1], sorted(_NUMBERS.findall(text))


def _run_here(module: str, arguments: List[str], seconds: int, printed: Any) -> None:
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), write_through=True)
        signal.alarm(seconds)
        # fairseq draws the masks of speech by a generator that no flag gives a seed.
        generator = np.random.default_rng
        np.random.default_rng = lambda seed=None: generator(1 if seed is None else seed)
        with mock_argv(f"fairseq-{module}", arguments):
            importlib.import_module(f"fairseq_cli.{module}").cli_main()
        status = 0
    except SystemExit as ending:
        status = int(bool(ending.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


Cell = Dict[str, Any]


def run_model(name: str, folder: Path, save: Path, seconds: int, plugin: bool) -> Cell:
    """Command -> what became of it, with the plugin or without, in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if plugin:
            importlib.import_module("spectral_fairseq.plugin")
        cells: Cell = {}
        for command in COMMANDS:
            if command != "train" and not (save / "checkpoint_last.pt").exists():
                continue
            module, arguments = arguments_of(MODELS[name], command, folder, save)
            passed, last, printed = run(module, arguments, seconds)
            cells[command] = {"passed": passed, "says": "" if passed else last, "prints": printed}
        with open(writing, "w") as end:
            json.dump(cells, end)
        os._exit(0)
    os.close(writing)
    with open(reading) as end:
        found: Cell = json.load(end)
    os.waitpid(child, 0)
    return found


def compared(bare: Cell, plugin: Cell) -> Dict[str, str]:
    """Command -> both, plugin, neither, bare, or differs."""
    words: Dict[str, str] = {}
    for command in COMMANDS:
        one, other = bare.get(command), plugin.get(command)
        sides = bool(one and one["passed"]), bool(other and other["passed"])
        words[command] = {
            (True, True): "both",
            (False, True): "plugin",
            (True, False): "bare",
            (False, False): "neither",
        }[sides]
        if one and other and sides == (True, True) and not _same(one["prints"], other["prints"]):
            words[command] = "differs"
    return words


def _same(bare: List[str], plugin: List[str]) -> bool:
    """Whether two commands print the same, but for rounding, or the second one has more."""
    if len(bare) > len(plugin):
        return False
    words = [re.findall(r"[^\s]+", line) for line in plugin]
    return all(any(_alike(line.split(), other) for other in words) for line in bare)


def _alike(left: List[str], right: List[str]) -> bool:
    def near(one: str, other: str) -> bool:
        try:
            return abs(float(one) - float(other)) <= 1e-3 * max(1.0, abs(float(one)))
        except ValueError:
            return one == other

    return len(left) == len(right) and all(map(near, left, right))


def rows(record: Record) -> List[str]:
    """The table of the page: models with equal results stand in one row."""
    alike: Dict[Tuple[str, ...], List[str]] = {}
    for name in MODELS:
        if name in record["table"]:
            alike.setdefault(tuple(record["table"][name].values()), []).append(name)
    return [
        f"fairseq {record['versions']['fairseq']}, torch {record['versions']['torch']}, "
        f"{record['date']}:",
        "",
        f"| {' | '.join(COMMANDS)} | models and tasks |",
        f"|{'---|' * (len(COMMANDS) + 1)}",
        *(f"| {' | '.join(cells)} | {'; '.join(names)} |" for cells, names in alike.items()),
    ]


def write(record: Record) -> None:
    """Write the record, and its table into docs/compatibility.md."""
    write_text(RECORD, json.dumps(record, indent=1) + "\n")
    block = "\n".join(["<!-- architectures -->", *rows(record), "<!-- /architectures -->"])
    write_text(PAGE, _BLOCK.sub(lambda _: block, PAGE.read_text("utf-8")))


def untried() -> List[str]:
    """Models that fairseq has, and that are neither in the table nor left out with a reason."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY

    tried = {ARCH_MODEL_NAME_REGISTRY[model.arch] for model in MODELS.values()}
    of_fairseq = {
        name for name, model in MODEL_REGISTRY.items() if model.__module__.startswith("fairseq.")
    }
    return sorted(of_fairseq - tried - set(NOT_TRIED))


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.matrix.architectures")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all without a result")
    parser.add_argument("--work-dir", type=Path, help="for data and checkpoints")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for each command")
    args = parser.parse_args(argv)
    with alone_with(RECORD, parser):
        return try_models(args)


def try_models(args: argparse.Namespace) -> int:
    """Try the models that are asked for; status 1 if one is worse with the plugin, or forgotten."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    for module in ("train", "generate", "interactive", "validate", "eval_lm"):
        importlib.import_module(f"fairseq_cli.{module}")  # once, before the forks
    record: Record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {"table": {}}
    worse = False
    with contextlib.ExitStack() as stack:
        work = args.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = work / "data"
        if not (data / "whole").exists():
            shutil.rmtree(data, ignore_errors=True)  # half of it, which a killed run has left
            data.mkdir(parents=True)
            make_data(data)
            (data / "whole").touch()
        for name in args.models or [name for name in MODELS if name not in record["table"]]:
            place = re.sub(r"\W+", "_", name)
            bare, plugin = (
                run_model(name, data, work / side / place, args.seconds, side == "plugin")
                for side in ("bare", "plugin")
            )
            found = record["table"][name] = compared(bare, plugin)
            record["date"] = datetime.date.today().isoformat()
            record["versions"] = {key: versions()[key] for key in ("fairseq", "torch")}
            write(record)
            says = [one["says"] for side in (bare, plugin) for one in side.values() if one["says"]]
            print(name, found, *says, sep="\n    ", flush=True)
            worse |= bool({"bare", "differs"} & set(found.values()))
    if forgotten := untried():
        print("neither in the table nor left out with a reason:", *forgotten)
    return int(worse or bool(forgotten))


if __name__ == "__main__":
    sys.exit(main())
