"""Nothing in a checkpoint, a setting or the name of a folder runs code or chooses a program."""

import ast
import contextlib
import functools
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.checkpoints.settings import EVALUATED
from spectral_fairseq.commands import main as command
from spectral_fairseq.errors import CheckpointError
from tests.compat.fairseq_process import Fails, Failure
from tests.conftest import PACKAGE, Command

PACKAGES = {
    name: Path(importlib.util.find_spec(name).submodule_search_locations[0])
    for name in ("fairseq", "fairseq_cli")
}


@functools.cache
def calls():
    """Modules of the installed fairseq, each call of a name in them, and that name."""
    return list(_calls())


def _calls():
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] == "examples":  # programs of their own, which --user-dir does not import
                continue
            module = ".".join((package, *parts)).replace(".__init__", "")
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    yield module, node, name


def is_builtin(node):
    return isinstance(node.func, ast.Name)


def sinks():
    return sorted({m for m, node, name in calls() if name == "eval" and is_builtin(node)})


@pytest.mark.slow
def test_the_sinks_are_found():
    assert len(sinks()) > 15 and {"fairseq.utils", "fairseq.models.fconv"} <= set(sinks())
    assert not [m for m, node, name in calls() if name == "exec" and is_builtin(node)]


@pytest.mark.slow
def test_every_evaluated_setting_is_known_by_name():
    """eval(args.x), utils.eval_str_list(self.cfg.x, ...) and so on, over all of fairseq."""
    evaluated = {
        node.args[0].attr
        for _, node, name in calls()
        if name in ("eval", "eval_str_list", "eval_str_dict", "eval_bool") and node.args
        if isinstance(node.args[0], ast.Attribute)
    }
    assert "adaptive_softmax_cutoff" in evaluated
    assert evaluated <= EVALUATED


def evaluate_in(modules, texts):
    """What ``eval(text)`` is in the code of each module, or why it has none."""
    import importlib
    import types

    found = []
    code = compile("eval(text)", "sink", "eval")
    for module in modules:
        try:
            home = importlib.import_module(module)
        except ImportError:
            found.append(["not importable"])
            continue
        values = []
        for text in texts:
            vars(home)["text"] = text
            try:
                values.append(repr(types.FunctionType(code, vars(home), "sink")()))
            except Exception as error:
                values.append(f"{type(error).__name__}: {error}")
            finally:
                del vars(home)["text"]
        found.append(values)
    return found


def test_no_sink_runs_code(bare, patched, tmp_path):
    marker = tmp_path / "executed"
    hostile = f"open({str(marker)!r}, 'a').write('x') and [1]"
    texts = [hostile, "[(1, 2)] * 2"]
    found = bare.call(evaluate_in, modules=sinks(), texts=texts)
    run = [module for module, values in zip(sinks(), found) if len(values) == 2]
    assert len(run) > 10 and marker.read_text() == "x" * len(run)
    marker.unlink()
    for values in patched.call(evaluate_in, modules=run, texts=texts):
        assert re.match("ConfigurationError: .*a literal value", values[0])
        assert values[1] == "[(1, 2), (1, 2)]"
    assert not marker.exists()


def values_of_architectures():
    """All strings that the registered architectures put into evaluated settings."""
    from argparse import Namespace

    from fairseq.models import ARCH_CONFIG_REGISTRY

    from spectral_fairseq.checkpoints.settings import EVALUATED

    found = {}
    for arch, fill_in in ARCH_CONFIG_REGISTRY.items():
        args = Namespace()
        try:
            fill_in(args)
        except (AttributeError, TypeError):  # it asks for an argument without a default
            continue
        found[arch] = [
            value
            for name, value in vars(args).items()
            if name in EVALUATED and isinstance(value, str)
        ]
    return found


def equal_to_eval(texts):
    from fairseq.models import fconv

    return all(fconv.eval(text) == eval(text) for text in texts)


def test_the_values_of_all_architectures_work(patched):
    found = patched.call(values_of_architectures)
    texts = sorted({text for values in found.values() for text in values})
    assert "[(256, 3)] * 4" in found["fconv_iwslt_de_en"] and len(texts) > 10
    patched.gives(True, equal_to_eval, texts=texts)


def build(path):
    from fairseq.checkpoint_utils import load_model_ensemble_and_task

    load_model_ensemble_and_task([path])


def test_a_checkpoint_runs_no_code(bare, patched, checkpoint, tmp_path, capsys):
    """One with a setting that runs code, as plain dictionaries, which torch allows."""
    path, marker = tmp_path / "hostile.pt", tmp_path / "executed"
    state = load_checkpoint(checkpoint)
    model = dict(vars(state["args"] or state["cfg"]["model"]))
    model["adaptive_softmax_cutoff"] = f"open({str(marker)!r}, 'w') and [5]"
    state["cfg"] = {**(state["cfg"] or {}), "model": {**model, "_name": model["arch"]}}
    torch.save({**state, "args": None}, path)
    bare.gives(Fails(), build, path=str(path))  # afterwards: the softmax has no weights there
    assert marker.exists()
    marker.unlink()
    refused = Fails("cfg.model.adaptive_softmax_cutoff", "UntrustedError")
    patched.gives(refused, build, path=str(path))
    with pytest.raises(CheckpointError, match="cfg.model.adaptive_softmax_cutoff"):
        load_checkpoint(path)
    assert command.main(["export", str(path), str(tmp_path / "out.pt")]) == 2
    assert "adaptive_softmax_cutoff" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["bare", "patched"])
def test_a_command_that_is_the_main_program(kind, fork_server, tmp_path):
    """Its module is called __main__; it evaluates the flag before it opens the checkpoint."""
    marker = tmp_path / "executed"
    (tmp_path / "dict.txt").write_text("a 1\n")
    arguments = ["--path", "none.pt", "--model-overrides", f"open({str(marker)!r}, 'w') and {{}}"]
    if kind == "patched":
        arguments += ["--user-dir", str(PACKAGE)]
    done = Command(fork_server, ("fairseq-eval-lm", tmp_path, "--cpu", *arguments)).finish(1)
    assert marker.exists() is (kind == "bare")
    assert ("a literal value" in done.stderr) is (kind == "patched")


def import_late(folder):
    """Import a module of fairseq that was not loaded when fairseq was patched."""
    import builtins
    import importlib

    import fairseq

    fairseq.__path__.append(folder)
    importlib.invalidate_caches()
    try:
        late = importlib.import_module("fairseq.imported_late")
    finally:
        fairseq.__path__.remove(folder)
    return [str(late.value), str(late.eval is not builtins.eval)]


def test_modules_that_are_imported_later(patched, tmp_path):
    (tmp_path / "imported_late.py").write_text("value = eval('[1] * 2')\n")
    patched.gives(["[1, 1]", "True"], import_late, folder=str(tmp_path))


def import_everything(folder, modules):
    """What a plugin takes with ``import *`` of each module, and what its ``eval`` is then."""
    import importlib
    import sys

    sys.path.insert(0, folder)
    found = {}
    for number, module in enumerate(modules):
        with open(f"{folder}/plugin{number}.py", "w") as file:
            file.write(f"from {module} import *\nvalue = eval('len([1, 2])')\n")
        importlib.invalidate_caches()
        plugin = vars(importlib.import_module(f"plugin{number}"))
        found[module] = [[name for name in plugin if not name.startswith("_")], plugin["value"]]
    return found


def test_a_plugin_that_imports_everything_keeps_its_own_eval(bare, patched, tmp_path):
    """Of modules with ``__all__`` and without, loaded before the patch and after."""
    modules = ["fairseq.utils", "fairseq.data", "fairseq.tasks", "fairseq.models.fconv_lm"]
    modules += ["fairseq.models.bart", "fairseq.benchmark.dummy_lm"]
    found, expected = (
        one.call(import_everything, folder=str(tmp_path), modules=modules)
        for one in (patched, bare)
    )
    for module in modules:
        ours, theirs = set(found[module][0]), set(expected[module][0])
        assert theirs <= ours and "eval" not in ours, module
        assert found[module][1] == 2


def import_beside_an_older_finder():
    """What fairseq catches where an optional module is missing."""
    import importlib
    import sys

    class Older:
        def find_module(self, name, path=None):
            return None

    sys.meta_path.insert(1, Older())
    importlib.import_module("fairseq.not_compiled")


def test_a_finder_of_the_older_protocol_is_passed_over(bare, patched):
    for process in (bare, patched):
        process.gives(Fails("No module named", "ImportError"), import_beside_an_older_finder)


# Where, and why that is left as it is.
KNOWN = {
    "fairseq.data.fasta_dataset": "a path that would run a program is refused: see "
    "compat/damaged_data.py",
    "fairseq.data.plasma_utils": "plasma_store without a shell; its arguments are a size and a "
    "temporary file",
    "fairseq.distributed.utils": "scontrol without a shell, with SLURM's own list of hosts",
    "fairseq.tasks.audio_pretraining": "--post-save-script of fairseq-train, which takes its "
    "settings from the command line and never from a checkpoint",
}
POST_SAVE = "post_save" in (PACKAGES["fairseq_cli"] / "train.py").read_text("utf-8")
if not POST_SAVE:  # fairseq 0.12.2
    del KNOWN["fairseq.tasks.audio_pretraining"]
FASTA = (PACKAGES["fairseq"] / "data" / "fasta_dataset.py").read_text("utf-8")
if "_build_index" not in FASTA:  # upstream from 2025-06 on
    del KNOWN["fairseq.data.fasta_dataset"]
indexes = pytest.mark.skipif("_build_index" not in FASTA, reason="this fairseq runs no shell")
STARTS = {"Popen", "call", "check_call", "check_output", "getoutput", "popen", "run", "system"}


@pytest.mark.slow
def test_all_places_that_start_programs_are_known():
    starting = {
        module
        for module, node, name in calls()
        if name in STARTS
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("os", "subprocess")
    }
    assert starting == set(KNOWN)


@pytest.mark.slow
@pytest.mark.skipif(not POST_SAVE, reason="this fairseq has no --post-save-script")
def test_the_script_after_saving_is_the_command_lines():
    """No other program calls it, and fairseq-train builds its task from its own arguments."""
    assert {module for module, _, name in calls() if name == "post_save"} == {"fairseq_cli.train"}
    builders = {module for module, _, name in calls() if name == "load_model_ensemble_and_task"}
    assert "fairseq_cli.train" not in builders and "fairseq_cli.validate" in builders


RECORDS = ">first one\nACGT\nACG\n>second\nTT\n>third\nA\n"


def opened(path):
    from fairseq.data import Dictionary, data_utils

    data_utils.load_indexed_dataset(path, Dictionary())


@indexes
def test_the_name_of_a_folder_runs_nothing(bare, patched, tmp_path):
    folder = tmp_path / "$(touch executed)"
    folder.mkdir()
    (folder / "train.fasta").write_text(RECORDS)
    patched.gives(Fails("passes .* to a shell", "DataError"), opened, path=str(folder / "train"))
    assert not (patched.folder / "executed").exists()
    with contextlib.suppress(Failure):  # some versions find no index then, and go on
        bare.call(opened, path=str(folder / "train"))
    assert (bare.folder / "executed").exists()
