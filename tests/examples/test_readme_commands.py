"""Every command of every README runs, on tiny data: readme_substitutions.py says what changes.

Of a loop, whose passes differ in a name alone, one pass runs, and those that the page builds upon.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PACKAGE
from tests.examples import readme_substitutions as table
from tests.examples.readme_blocks import (
    Block,
    blocks,
    commands_outside_blocks,
    fairseq_calls,
    with_short_loops,
)
from tests.examples.readme_models import NAMES, write_models
from tests.slurm import write_slurm

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples").exists():
    pytest.skip("the examples are not beside these tests", allow_module_level=True)
# test_adding_a_penalty.py and test_adding_a_format.py of the rooms run the commands of
# these pages, on files that they describe.
FOLLOWED_ELSEWHERE = {ROOT / "docs" / f"adding_a_{what}.md" for what in ("penalty", "format")}
READMES = [
    ROOT / "README.md",
    *sorted(set((ROOT / "docs").glob("*.md")) - FOLLOWED_ELSEWHERE),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "studies").rglob("*.md")),
]
# Programs that a block may name besides those that the server runs.
STAND_INS = {
    "make": f'exec {shutil.which("make")} -n -C "{ROOT}" "$@" > /dev/null',  # the target exists
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    "pip": f'test "$1" = install && test -e "{ROOT}/setup.py"',
}


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory, fork_server, plugin_server):
    """The programs of the READMEs, which servers run in forks of themselves."""
    folder = tmp_path_factory.mktemp("bin")
    for function in ("run", "parse"):
        call = f"tests.examples.readme_programs:{function}"
        names = (folder / function, call, "python")
        fork_server.write_programs(*names, with_plugin=plugin_server)
    for program, script in STAND_INS.items():
        path = folder / "run" / program
        path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        path.chmod(0o755)
    write_slurm(folder / "run")
    return folder


@pytest.fixture
def sandbox(tmp_path, request, bin_folder):
    """What looks like a clone after data preparation, for the files that need it."""

    def make(text):
        for name in ("examples", "spectral_fairseq", "setup.py"):
            (tmp_path / name).symlink_to(ROOT / name if name != "spectral_fairseq" else PACKAGE)
        for name, fixture in table.DATA.items():
            if name in text or Path(name).name in text:
                link(tmp_path / name, request.getfixturevalue(fixture))
        for name, source in table.TEXTS.items():
            if str(Path(name).parent) in text:
                link(tmp_path / name, request.getfixturevalue("tiny_lm_data") / source)
        if any(name in text for name in NAMES):
            write_models(tmp_path)
        for name, arguments in table.CHECKPOINTS.items():
            if re.search(rf"[ :]{re.escape(name)}\b", text):
                train = request.getfixturevalue("train")
                shutil.copy(train(*arguments) / "checkpoint_best.pt", tmp_path / name)
        return tmp_path

    return make


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def bash(text, folder, programs):
    """Run a script with the stand-ins first on the path."""
    env = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(PACKAGE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def check(block, folder, bin_folder):
    """Run a block, or look at it closely if it cannot run; returns what is wrong, or nothing."""
    syntax = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
    if syntax.returncode:
        return syntax.stderr
    if not block.not_run:
        done = bash(block.text, folder, bin_folder / "run")
        return f"exit status {done.returncode}\n{done.stdout[-6000:]}" if done.returncode else ""
    for program, *arguments in fairseq_calls(block.text):
        if program == "fairseq-hydra-train":  # composes only when it runs
            continue
        done = subprocess.run(
            [bin_folder / "parse" / program, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            return f"{program} {' '.join(arguments)}\n{done.stdout[-3000:]}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_runs(path, sandbox, bin_folder):
    found = blocks(path)
    if not found:
        pytest.skip("no commands in it")
    page = "".join(block.text for block in found)
    folder = sandbox(page)
    for block in found:
        text, left_out = with_short_loops(block.text, page)
        problem = check(block._replace(text=text), folder, bin_folder)
        if problem:
            pytest.fail(f"{block}\n{block.text}\n{problem}")
        # A name of the other passes has to be that of data, of what a command has made, or of a
        # further command.
        made = (*folder.glob("data-bin/*/*"), *folder.rglob("*")) if left_out else ()
        for word in left_out - {one.name.split(".")[0] for one in made}:
            assert page.count(word) > 1, f"{block}: nothing else makes or names {word}"


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_command_escapes(path):
    assert not commands_outside_blocks(path), "put it into a block fenced by ```bash"


TRAIN = """\
fairseq-train data-bin/iwslt14.tokenized.de-en --user-dir spectral_fairseq \\
    --arch {arch} --criterion spectrum_control --optimizer adam --lr 0.001 --max-tokens 4096 {more}
"""
DISTRIBUTED = (
    'torchrun --nproc_per_node 8 "$(which fairseq-train)" ' + TRAIN[len("fairseq-train") :]
)


@pytest.mark.parametrize("not_run", [None, "needs eight GPUs"])
@pytest.mark.parametrize(
    "arch, more, problem",
    [
        ("transformer_sc_iwslt_de_en", "--share-all-embeddings", ""),
        ("transformer_sc_iwslt_de_en", "--share-every-embedding", "--share-every-embedding"),
        ("transformer_sc_iwslt_en_de", "", "transformer_sc_iwslt_en_de"),
        ("transformer_sc_iwslt_de_en", "'", "unexpected EOF"),
    ],
    ids=["sound", "unknown flag", "renamed arch", "syntax"],
)
def test_rotten_blocks_are_found(sandbox, bin_folder, not_run, arch, more, problem):
    text = (DISTRIBUTED if not_run else TRAIN).format(arch=arch, more=more)
    folder = sandbox(text)
    found = check(Block(Path("README.md"), 1, text, not_run), folder, bin_folder)
    assert bool(found) == bool(problem), found
    assert problem in found


@pytest.mark.parametrize(
    "text",
    ["fairseq-unheard-of\n", "spectral-fairseq exprt a b\n", "make quickstrat\n", "false | cat\n"],
)
def test_other_commands_that_rot(sandbox, bin_folder, text):
    assert check(Block(Path("README.md"), 1, text, None), sandbox(text), bin_folder)


def test_blocks_are_found_with_their_marks(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(
        "```bash\none\n```\n\n<!-- not run: needs the network -->\n```bash\ntwo \\\n  three\n```\n"
        "```python\nfour\n```\n- list\n\n  ```bash\n  five\n  ```\n\n    fairseq-train six\n",
        "utf-8",
    )
    found = [(block.line, block.text, block.not_run) for block in blocks(path)]
    assert found == [
        (1, "one\n", None),
        (6, "two \\\n  three\n", "needs the network"),
        (15, "  five\n", None),
    ]
    assert commands_outside_blocks(path) == ["fairseq-train six"]


def test_loops_are_cut_to_what_the_page_needs():
    text = "for a in one \\\n    two three; do\n    for b in $X; do echo $a $b; done\ndone\n"
    short, left_out = with_short_loops(text, text + "cat out/three/log\n")
    assert short == "for a in one three; do\n    for b in $X; do echo $a $b; done\ndone\n"
    assert left_out == {"two"}


def test_calls_are_taken_out_of_scripts():
    text = (
        "TEXT=a  # fairseq-train in a comment\n"
        "for seed in 1 2; do fairseq-train d --seed $seed; done\n"
        "torchrun --nproc_per_node 8 $(which fairseq-train) d --lr 1 \\\n  --fp16 | tee log\n"
        "sbatch --wrap 'srun fairseq-generate d --path \"$P\"'\n"
        "exec /usr/bin/fairseq-eval-lm d && echo done\n"
        'sbatch --wrap "\nsrun fairseq-train d \\\n  --lr 2"\n'
    )
    assert fairseq_calls(text) == [
        ["fairseq-train", "d", "--seed", "1"],
        ["fairseq-train", "d", "--lr", "1", "--fp16"],
        ["fairseq-generate", "d", "--path", "1"],
        ["fairseq-eval-lm", "d"],
        ["fairseq-train", "d", "--lr", "2"],
    ]


def test_rules_change_sizes_and_drop_what_a_cpu_cannot_do():
    given = ["fairseq-train", "d", "--arch", "transformer_sc", "--fp16", "--lr", "1"]
    changed = table.substitute(given)
    assert changed[:4] == given[:4] and "--fp16" not in changed
    assert changed[changed.index("--encoder-layers") + 1] == "1"
    assert "--cpu" in changed and "--decoder-input-dim" not in changed
