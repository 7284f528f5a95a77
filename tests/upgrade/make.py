"""Keep what the next versions have to go on with: checkpoints, flags and results of this one.

Usage, at a release: ``python -m tests.upgrade.make``. It writes ``tests/upgrade/VERSION.zip``,
which ``test_upgrade.py`` reads and which stays as it is for good:

- ``text/``: the sentences of all trainings;
- ``cases.json``: for each training its data, flags, validation loss and translations;
- ``NAME.pt``: the checkpoint after the first of two epochs;
- ``NAME_resumed.pt``: the weights after the second.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from spectral_fairseq import __version__
from spectral_fairseq.checkpoints.reading import load_checkpoint

HERE = Path(__file__).parent
ROOT = HERE.parents[1]  # where the commands run: a checkpoint then holds no path of a machine
PACKAGE = "spectral_fairseq"
SPLITS = ("train", "valid", "test")

SIDE = "--{0}-embed-dim 16 --{0}-ffn-embed-dim 24 --{0}-layers 1 --{0}-attention-heads 2"
MT = (
    f"--task translation --source-lang de --target-lang en {SIDE.format('encoder')}"
    f" {SIDE.format('decoder')} --lr 0.005 --max-tokens 96 --label-smoothing 0.1"
)
LM = "--decoder-embed-dim 12 --lr 0.005 --task stateful_language_modeling --batch-size 4"
LM += " --batch-size-valid 3"
ADAM = "--optimizer adam"
CASES = {
    "svd": f"{MT} {ADAM} --arch transformer_sc --criterion spectrum_control"
    " --lr-scheduler inverse_sqrt --warmup-updates 4 --log-spectrum-interval 3",
    "control": f"{MT} {ADAM} --arch transformer --share-all-embeddings --criterion"
    " spectrum_control --spectrum-slack 1.2 --table-centering 0.01 --spectrum-decay-interval 2",
    "weight_norm": f"{MT} --arch transformer_wn_iwslt_de_en --criterion mle_cosreg"
    f" {ADAM} --weight-norm-target-by-count --weight-norm-weight 0.01",
    "spectral_norm": f"{MT} {ADAM} --arch transformer_sc --embedding-type spectral-norm"
    " --criterion regularized_cross_entropy --rdrop-weight 1",
    "mos": f"{MT} {ADAM} --arch transformer_mos --mixture-components 3"
    " --criterion spectrum_control",
    "dense": f"{MT} {ADAM} --arch transformer --share-decoder-input-output-embed --criterion"
    " regularized_cross_entropy --loss-form dense",
    "softcap": f"{MT} {ADAM} --arch transformer_sc --embedding-type plain --logit-softcap 5"
    " --criterion regularized_cross_entropy --z-loss 0.001",
    "lm_svd": "--task language_modeling --tokens-per-sample 16 --decoder-input-dim 16"
    f" --decoder-output-dim 16 {SIDE.format('decoder')} --lr 0.005 --max-tokens 96 {ADAM}"
    " --share-decoder-input-output-embed --arch transformer_lm_sc --decoder-normalize-before"
    " --criterion spectrum_control",
    "awd_lstm": f"{LM} --arch awd_lstm_ptb --criterion mle_cosreg --decoder-hidden-size 12"
    " --lr 0.5 --tokens-per-sample 12 --optimizer nt_asgd --lr-scheduler nt_asgd"
    " --nt-asgd-from-start",
    "transformer_xl": f"{LM} {ADAM} --arch transformer_xl_wt103_small --criterion"
    " spectrum_control --tokens-per-sample 10 --mem-len 10 --decoder-attention-heads 2"
    " --decoder-layers 2 --decoder-ffn-embed-dim 20 --lr-scheduler cosine --clip-norm 0.25"
    " --adaptive-softmax-cutoff 10,20,30 --embedding-type svd",
}
# One thread and one process: what is kept does not depend on the machine but for its rounding.
ALONE = "--seed 7 --max-update 100 --num-workers 0 --data-buffer-size 0 --cpu"
ALONE += " --distributed-world-size 1"


def data_of(flags):
    """The folder of the binarised text that a training reads: ``mt`` or ``lm``."""
    return "mt" if "--task translation" in flags else "lm"


def task_of(flags):
    """``--task NAME``, which the commands of evaluation want too."""
    return re.search(r"--task (\w+)", flags)[1]


def preprocess_flags(text, destination):
    """Command lines of ``fairseq-preprocess`` for both kinds of data."""
    pair = [flag for one in SPLITS for flag in (f"--{one}pref", f"{text}/{one}")]
    alone = [flag for one in SPLITS for flag in (f"--{one}pref", f"{text}/{one}.de")]
    languages = ["--source-lang", "de", "--target-lang", "en", "--joined-dictionary"]
    yield [*languages, *pair, "--destdir", f"{destination}/mt"]
    yield ["--only-source", *alone, "--destdir", f"{destination}/lm"]


def train_flags(flags, data, folder, epochs):
    """The command line of ``fairseq-train``."""
    return [
        *(f"{data}/{data_of(flags)}", "--user-dir", PACKAGE, "--save-dir", str(folder)),
        *(*flags.split(), *ALONE.split(), "--max-epoch", str(epochs)),
    ]


def evaluation_flags(flags, data, path):
    """Those that ``fairseq-validate`` and ``fairseq-generate`` share."""
    return [
        *(f"{data}/{data_of(flags)}", "--user-dir", PACKAGE, "--path", str(path), "--cpu"),
        *("--num-workers", "0", "--distributed-world-size", "1", "--batch-size", "3"),
    ]


def validation_loss(printed):
    """The loss in what ``fairseq-validate --log-format json`` has printed."""
    (loss,) = re.findall(r'"valid_loss": "([\d.]+)"', printed)
    return float(loss)


def translations(printed):
    """The hypotheses in what ``fairseq-generate`` has printed."""
    lines = [line.split("\t") for line in printed.splitlines() if line.startswith("H-")]
    return sorted([name, words] for name, _, words in lines)


def _run(program, *flags):
    done = subprocess.run(
        [Path(sys.executable).parent / program, *flags], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{program} {' '.join(flags)}\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def main():
    """Train every case, and write the archive."""
    path = HERE / f"{__version__}.zip"
    if path.exists():
        sys.exit(f"{path} exists and stays as it is; set the version of the next release first.")
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        with zipfile.ZipFile(HERE / "0.1.0.zip") as first:  # whose text is that of all versions
            first.extractall(base, [one for one in first.namelist() if one.startswith("text/")])
        for flags in preprocess_flags(base / "text", base):
            _run("fairseq-preprocess", *flags)
        kept, cases = {}, {}
        for name, flags in CASES.items():
            folder = base / name
            _run("fairseq-train", *train_flags(flags, base, folder, 1))
            last = folder / "checkpoint_last.pt"
            kept[f"{name}.pt"] = last.read_bytes()
            _run("fairseq-train", *train_flags(flags, base, folder, 2))
            torch.save(load_checkpoint(last)["model"], base / "weights.pt")
            kept[f"{name}_resumed.pt"] = (base / "weights.pt").read_bytes()
            common = evaluation_flags(flags, base, last)
            task = ["--task", task_of(flags), "--log-format", "json"]
            cases[name] = {
                "flags": flags,
                "validation": validation_loss(_run("fairseq-validate", *common, *task)),
                "translations": translations(_run("fairseq-generate", *common, "--beam", "3"))
                if data_of(flags) == "mt"
                else [],
            }
            print(name, cases[name]["validation"], flush=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("cases.json", json.dumps(cases, indent=1))
            for file in sorted((base / "text").iterdir()):
                archive.write(file, f"text/{file.name}")
            for name, content in kept.items():
                archive.writestr(name, content)


if __name__ == "__main__":
    main()
