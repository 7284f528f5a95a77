"""Patches of how fairseq reads, writes and rebuilds checkpoints: safely, whole, and as saved."""

import os
import zipfile

import pytest
import torch

from spectral_fairseq.provenance import torch_release
from tests.checkpoints.made import Payload
from tests.compat.conftest import train_arguments
from tests.compat.fairseq_process import Fails, Failure
from tests.compat.test_nothing_runs import PACKAGES

# From torch 2.6 on torch.load refuses by default, and fairseq asks it not to from 2025-09 on.
REFUSES = torch_release() >= (2, 6)
BARE_REFUSES = REFUSES and "weights_only=False" not in (
    PACKAGES["fairseq"] / "checkpoint_utils.py"
).read_text("utf-8")


# Safe loading


def round_trips():
    """Save and load what fairseq's checkpoints, or its messages between workers, hold."""
    import argparse
    import io
    from collections import OrderedDict

    import numpy as np
    import torch
    from fairseq.distributed.utils import _put_tensors_in_obj, _split_tensors_from_obj
    from omegaconf import OmegaConf

    config = OmegaConf.create({"model": {"lr": [0.5, 1], "name": "x", "flag": True, "none": None}})
    contents = {
        "arguments of a legacy arch": argparse.Namespace(arch="lstm", lr=[0.5]),
        "a score as numpy number": {"best": np.float64(27.5), "n": np.int64(3)},
        "counts as numpy array": {"_bleu_counts": np.array([1, 2, 3, 4]), "f": np.ones(2, "f4")},
        "the message on resuming": _split_tensors_from_obj(
            {"cfg": config, "model": OrderedDict(w=torch.ones(2))}, []
        ),
    }
    outcomes = {}
    for name, content in contents.items():
        buffer = io.BytesIO()
        torch.save(content, buffer)
        buffer.seek(0)
        try:
            loaded = torch.load(buffer, map_location="cpu")
        except Exception as error:
            outcomes[name] = str(error)
            continue
        outcomes[name] = "loaded"
        if name == "the message on resuming":
            loaded = _put_tensors_in_obj(loaded, [torch.ones(2)])
            assert loaded["model"]["w"].tolist() == [1.0, 1.0]
            assert loaded["cfg"] == config
        else:
            assert repr(loaded) == repr(content)
    return outcomes


def test_plain_content_loads(bare, patched):
    outcomes = patched.call(round_trips)
    assert len(outcomes) == 4 and set(outcomes.values()) == {"loaded"}
    if REFUSES:
        assert all("weights only" in one.lower() for one in bare.call(round_trips).values())


def load_with_torch(path):
    import torch

    torch.load(path)


def load(path):
    from fairseq import checkpoint_utils

    checkpoint_utils.load_checkpoint_to_cpu(path)


@pytest.mark.skipif(not REFUSES, reason="this torch refuses nothing by default")
@pytest.mark.parametrize("reader, expected", [
    (load_with_torch, Fails("exec")),
    (load, Fails(r"object ((builtins|__builtin__)\.)?exec,", "UntrustedError")),
])  # fmt: skip
def test_a_foreign_object_is_refused_unexecuted(reader, expected, patched, tmp_path):
    marker = tmp_path / "executed"
    torch.save({"model": {}, "args": Payload(marker)}, tmp_path / "evil.pt")
    patched.gives(expected, reader, path=str(tmp_path / "evil.pt"))
    assert not marker.exists()


def load_without_safety(path, installed_again):
    """By fairseq's loader of 2025-09, which differs from older ones in one argument."""
    import inspect

    from fairseq import checkpoint_utils

    source = inspect.getsource(checkpoint_utils.load_checkpoint_to_cpu)
    old = 'torch.load(f, map_location=torch.device("cpu"))'
    new = 'torch.load(f, map_location=torch.device("cpu"), weights_only=False)'
    assert old in source or "weights_only=False" in source
    exec(source.replace(old, new), vars(checkpoint_utils))
    if installed_again:  # which fails where it has no effect
        from spectral_fairseq.compat.checkpoints import DAMAGED_CHECKPOINT, SAFE_LOADING

        SAFE_LOADING.install()
        DAMAGED_CHECKPOINT.install()
    checkpoint_utils.load_checkpoint_to_cpu(path)


@pytest.mark.skipif(torch_release() < (1, 13), reason="this torch.load has no weights_only")
@pytest.mark.parametrize("which", ["bare", "patched"])
def test_a_loader_that_asks_for_no_safety_gets_it(which, request, checkpoint, tmp_path):
    process, marker, evil = request.getfixturevalue(which), tmp_path / "done", tmp_path / "evil.pt"
    history = [{"num_updates": 1, "optimizer_name": "", "lr_scheduler_state": {}}]
    state = {"model": {}, "optimizer_history": history, "extra_state": {"train_iterator": None}}
    torch.save({**state, "payload": Payload(marker)}, evil)
    is_patched = which == "patched"
    expected = Fails(kind="UntrustedError") if is_patched else None
    process.gives(expected, load_without_safety, path=str(evil), installed_again=is_patched)
    assert marker.exists() is not is_patched
    process.call(load_without_safety, path=str(checkpoint), installed_again=is_patched)


def a_dictionary_of_a_task(path):
    """Save the dictionary of a task as HuBERT's training does, and load it."""
    import torch
    from fairseq import checkpoint_utils
    from fairseq.data.dictionary import Dictionary

    dictionary = Dictionary()
    dictionary.add_symbol("a word")
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    state = {
        "args": None,
        "cfg": {"model": {}, "task": {"_name": "hubert_pretraining"}},
        "model": {},
        "optimizer_history": [{**history, "num_updates": 3}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "task_state": {"dictionaries": [dictionary]},
    }
    torch.save(state, path)
    (kept,) = checkpoint_utils.load_checkpoint_to_cpu(path)["task_state"]["dictionaries"]
    return [type(kept) is Dictionary, len(kept), kept.index("a word")]


def test_a_dictionary_loads(bare, patched, tmp_path):
    path = str(tmp_path / "hubert.pt")
    patched.gives([True, 5, 4], a_dictionary_of_a_task, path=path)
    if BARE_REFUSES:
        bare.gives(Fails("dictionary.Dictionary"), a_dictionary_of_a_task, path=path)


# Files that are no checkpoints


@pytest.fixture
def truncated(tmp_path, checkpoint):
    path = tmp_path / "truncated.pt"
    path.write_bytes(checkpoint.read_bytes()[:5000])
    return path


def test_truncated(bare, patched, truncated):
    assert str(truncated) not in bare.gives(Fails(), load, path=str(truncated)).message
    failure = patched.gives(Fails("copy it again"), load, path=str(truncated))
    assert failure.kinds[0] == "DamagedError" and str(truncated) in failure.message


def test_a_bomb_and_a_pipe(patched, tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(10_000_000))
    os.mkfifo(tmp_path / "pipe.pt")
    patched.gives(Fails("declares 10,000,000 bytes"), load, path=str(tmp_path / "bomb.pt"))
    patched.gives(Fails("a device or a pipe"), load, path=str(tmp_path / "pipe.pt"))


def test_not_from_fairseq(bare, patched, tmp_path):
    path = str(tmp_path / "other.pt")
    torch.save({"state_dict": {}}, path)
    assert bare.gives(Fails(), load, path=path).kinds[0] == "KeyError"
    failure = patched.gives(Fails("a fairseq checkpoint"), load, path=path)
    assert failure.kinds[0] == "NotFairseqError"


@pytest.mark.parametrize("flag", ["--restore-file", "--finetune-from-model"])
def test_training_does_not_start(patched, data, truncated, tmp_path, flag):
    saved = tmp_path / "saved"
    arguments = train_arguments(data, saved, flag, str(truncated), "--max-epoch", "1")
    with pytest.raises(Failure) as caught:
        patched.cli("fairseq_cli.train", *arguments)
    assert caught.value.kinds[0] == "DamagedError"
    assert list(saved.iterdir()) == []


# What is saved: whole files


def killed_while_copying(folder):
    """Overwrite a good file by a copy that dies half way; what the target holds, and its link."""
    import os
    import shutil
    from unittest import mock

    from fairseq.file_io import PathManager

    source, target, link = (os.path.join(folder, n) for n in ("source.pt", "best.pt", "link.pt"))
    for path, text in ((source, "new new"), (target, "old old")):
        with open(path, "w") as file:
            file.write(text)
    os.symlink(target, link)

    def half(src, dst):
        with open(dst, "w") as file:
            file.write("new")
        raise KeyboardInterrupt

    found = []
    with mock.patch.object(shutil, "copyfile", half):
        try:
            PathManager.copy(source, link, overwrite=True)
        except KeyboardInterrupt:
            found.append(open(target).read())
    assert PathManager.copy(source, link, overwrite=True)
    return found + [open(target).read(), str(os.path.islink(link))]


def test_the_old_file_survives_a_copy_that_dies(bare, patched, tmp_path):
    for process, held in ((bare, "new"), (patched, "old old")):
        folder = tmp_path / held
        folder.mkdir()
        process.gives([held, "new new", "True"], killed_while_copying, folder=str(folder))


# What is loaded: dead keys, and layers that are kept


def load_stock_checkpoint(keep, extra):
    """Load weights with stock's dead keys into a plain transformer; true if they are all used."""
    from argparse import Namespace

    import torch
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture

    words = Dictionary()
    words.add_symbol("w")

    class Task:
        source_dictionary = target_dictionary = words

    def build(layers, keep):
        size = {"encoder_embed_dim": 8, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
        args = Namespace(arch="transformer", **size, encoder_layers=layers, decoder_layers=1)
        args.encoder_layers_to_keep = keep
        base_architecture(args)
        return TransformerModel.build_model(args, Task())

    source = build(4, None)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    dead = ["in_proj", "out_proj", "fc1", "fc2"]
    for layer in range(4):
        for part in dead:
            for kind in ("weight", "bias"):
                state[f"encoder.layers.{layer}.{part}_{kind}"] = torch.zeros(8)
    if extra is not None:
        state[extra] = torch.zeros(8)

    target = build(2 if keep else 4, keep)
    settings = Namespace(arch="transformer", encoder_layers_to_keep=keep)
    settings.decoder_layers_to_keep = "0" if keep else None
    target.load_state_dict(state, strict=True, model_cfg=settings)
    last = target.encoder.layers[-1].fc1.weight
    return bool(torch.equal(last, source.encoder.layers[-1].fc1.weight))


def has_them_itself():
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    return "_load_from_state_dict" in vars(TransformerEncoderLayerBase)


@pytest.mark.parametrize("keep, extra", [
    (None, None),
    ("0,3", None),  # pruned to two layers
    (None, "encoder.layers.0.fc3_weight"),
    (None, "decoder.layers.0.fc1_weight"),
    (None, "fc1_weight"),
])  # fmt: skip
def test_dead_keys_alone_are_dropped(bare, patched, keep, extra):
    if bare.call(has_them_itself):
        pytest.skip("this fairseq has these parameters itself")
    unexpected = Fails("Unexpected key")
    patched.gives(unexpected if extra else True, load_stock_checkpoint, keep=keep, extra=extra)
    bare.gives(
        Fails("Unexpected key.*in_proj_weight"), load_stock_checkpoint, keep=keep, extra=extra
    )


def prune(kept, encoder, decoder):
    """Load weights of so many layers: the layers that a model gets, and what its settings say."""
    from fairseq.checkpoint_utils import prune_state_dict
    from omegaconf import OmegaConf

    state = {
        f"{side}.layers.{layer}.fc1.weight": f"{side[0]}{layer}"
        for side, number in (("encoder", encoder), ("decoder", decoder))
        for layer in range(number)
    }
    settings = OmegaConf.create({"_name": "any", "decoder_layers": 12, **kept})
    OmegaConf.set_struct(settings, True)
    found = prune_state_dict(state, settings)
    names = sorted(found)
    return [
        [found[name] for name in names],
        [name.split(".")[2] for name in names],
        {name: settings.get(name) for name in ("encoder_layers", "decoder_layers", *kept)},
    ]


def keeping(encoder=None, decoder=None):
    """Settings that keep layers of the encoder, the decoder or both."""
    kept = {"encoder_layers_to_keep": encoder, "decoder_layers_to_keep": decoder}
    return {name: value for name, value in kept.items() if value is not None}


@pytest.mark.parametrize("kept, encoder, decoder, layers, numbers, settings", [
    (keeping("0,2", "3,1"), 4, 4, "d1 d3 e0 e2", "0101", (2, 2)),
    (keeping("0,2", "3,1"), 2, 2, "d0 d1 e0 e1", "0101", (2, 2)),
    (keeping(decoder="1"), 2, 3, "d1 e0 e1", "001", (None, 1)),
    (keeping(decoder=[0, 2]), 0, 3, "d0 d2", "01", (None, 2)),  # as YAML reads it
    (keeping(decoder=1), 0, 3, "d1", "0", (None, 1)),
    ({"encoder_layers_to_keep": None}, 1, 1, "d0 e0", "00", (None, 12)),
])  # fmt: skip
def test_settings_say_which_layers_are_kept(
    patched, kept, encoder, decoder, layers, numbers, settings
):
    said = {"encoder_layers": settings[0], "decoder_layers": settings[1], **dict.fromkeys(kept)}
    expected = [layers.split(), [*numbers], said]
    patched.gives(expected, prune, kept=kept, encoder=encoder, decoder=decoder)


@pytest.mark.parametrize("kept, match", [
    ("0,4", "4 layers of the checkpoint; found layer 4"),
    ("0,0", "to be different numbers of layers from 0, such as 0,2; found '0,0'"),
    ("first", "found 'first'"),
    ("-1,2", "found '-1,2'"),
])  # fmt: skip
def test_layers_that_are_not_there(patched, kept, match):
    patched.gives(Fails(match), prune, kept=keeping(kept), encoder=4, decoder=4)


def test_fairseq_still_forgets_the_number_of_layers(bare):
    """The patch can go once this fails."""
    found, _, said = bare.call(prune, kept=keeping(decoder="1"), encoder=2, decoder=3)
    assert found == ["d1"] and said["decoder_layers"] == 12
