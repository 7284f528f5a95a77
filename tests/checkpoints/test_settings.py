"""Literals, equal to what eval gives; intact files with other contents than fairseq writes."""

import argparse

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from spectral_fairseq.checkpoints.literals import MAX_ITEMS, literal
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq.formats.opening import open_model

GOOD = [
    "(0.9, 0.98)",
    "10,20",
    "  [1]",
    "True",
    "None",
    "1e-3",
    "-1",
    "+1.5",
    "0.5 / 4",
    "2 - 1",
    "[(512, 3)] * 20",
    "3 * [True]",
    "[(512, 3)] * 9 + [(1024, 3)] * 4",
    "[1] * 2 + [2] * (1 + 2)",
    "{'a': [1, 2], 'b': None}",
    "{1, 2}",
    "'a' + \"b\"",
    "b'a' * 2",
    "1 + 2j",
    "()",
    "[]",
    "{}",
    "[(1, 64),\n (2, 128)]",
]

BAD = [
    "",
    "()()",
    "print",
    "print()",
    "__import__('os').system('true')",
    "[].__class__",
    "(1)[0]",
    "[x for x in (1, 2)]",
    "lambda: 0",
    "f'{1}'",
    "1 if 1 else 2",
    "1 and 2",
    "not 1",
    "1 < 2",
    "{**{}}",
    "[*[1]]",
    "...",
    "1; 2",
    "a = 1",
    "(a := 1)",
    "2 ** 3",
    "2 // 1",
    "1 @ 2",
    "~1",
    "'a' - 'b'",
    "'%s' % 1",
    "[1] * 1.5",
    "[1] + (2,)",
    "-'a'",
    "1 + 'a'",
    "1 / 0",
    "{[]}",
    "[1] * 10**9",
    f"[1] * {MAX_ITEMS + 1}",
    "[" + "[0] * 100000," * 11 + "]",
    f"[[1] * -{MAX_ITEMS}, [1] * {MAX_ITEMS}, [1] * 2]",
    f"['a' * 1000] * 1000 + [1] * {MAX_ITEMS}",
    "(" * 5000 + ")" * 5000,
    "-" * 100_000 + "1",
    "[" * 150,
    "1" * 5_000_000,
    "\x00",
]


@pytest.mark.parametrize("text", GOOD)
def test_equals_eval(text):
    found = literal(text)
    assert found == eval(text) and type(found) is type(eval(text))


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:20] or "empty")
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigurationError, match="literal value") as caught:
        literal(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [None, 1, [1], b"1"])
def test_what_is_no_string_fails_as_in_eval(value):
    with pytest.raises(TypeError):
        literal(value)


def checkpoint(**changed):
    return {
        "args": None,
        "cfg": {
            "common": {"seed": 1},
            "model": {"_name": "transformer", "decoder_layers": 6, "adaptive_softmax_cutoff": None},
            "task": {"data": "data-bin", "left_pad_source": "True"},
            "optimizer": {"adam_betas": "(0.9, 0.98)"},
        },
        "model": {"w": torch.ones(2, 3), "n": torch.ones(1, dtype=torch.int64)},
        "optimizer_history": [{"num_updates": 3, "criterion_name": "c"}],
        "extra_state": {"best": 1.5, "val_loss": 2, "train_iterator": {"epoch": 2}},
        "task_state": {},
        "last_optimizer_state": None,
        **changed,
    }


def loaded(tmp_path, state):
    torch.save(state, tmp_path / "checkpoint.pt")
    return load_checkpoint(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("changed", [
    {},
    {"cfg": None, "args": argparse.Namespace(arch="fconv", encoder_layers="[(512, 3)] * 20")},
    {"cfg": {"model": argparse.Namespace(arch="lstm", decoder_attention="True")}},
    {"cfg": {"model": {"w2v_args": {"conv_feature_layers": "[(512, 10, 5)] + [(512, 3, 2)] * 4"}}}},
    {"cfg": {"model": {"_name": "a_users_own", "pretrained": "/models/bert.pt"}}},
    {"optimizer_history": [], "extra_state": None, "task_state": None},
    {"extra_state": {"best": torch.tensor(1.0), "val_loss": float("inf"), "train_iterator": None}},
])  # fmt: skip
def test_what_fairseq_writes_is_loaded(tmp_path, changed):
    assert loaded(tmp_path, checkpoint(**changed)).keys() == checkpoint().keys()


def test_entries_may_be_missing(tmp_path):
    assert loaded(tmp_path, {"model": {}}) == {"model": {}}


@pytest.mark.parametrize("changed, match", [
    ({"args": {"arch": "lstm"}}, "args to be an argparse.Namespace.*type dict"),
    ({"cfg": [1]}, "cfg to be a dictionary.*type list"),
    ({"cfg": "model"}, "cfg to be a dictionary.*type str"),
    ({"cfg": {"model": "transformer"}}, r"cfg\.model to be a dictionary or an argparse.Namespace"),
    ({"cfg": {"task": 3}}, r"cfg\.task"),
    ({"cfg": {"model": {"_name": ["fconv"]}}}, r"cfg\.model\._name to be a string.*type list"),
    ({"cfg": {"criterion": {"_name": ["mle_cosreg"]}}}, r"cfg\.criterion\._name to be a string"),
    ({"args": argparse.Namespace(arch=["lstm"])}, r"args\.arch to be a string"),
    ({"optimizer_history": {}}, "optimizer_history to be a list.*type dict"),
    ({"optimizer_history": [3]}, r"optimizer_history\[0\] to be a dictionary"),
    ({"optimizer_history": [{"num_updates": "many"}]}, r"\[0\]\.num_updates to be a whole number"),
    ({"optimizer_history": [{"num_updates": float("nan")}]}, "num_updates to be a whole number"),
    ({"extra_state": [1]}, "extra_state to be a dictionary"),
    ({"extra_state": {"best": "low"}}, r"extra_state\.best to be a number"),
    ({"extra_state": {"train_iterator": 4}}, r"extra_state\.train_iterator to be a dictionary"),
    ({"extra_state": {"train_iterator": {"epoch": "2"}}}, "train_iterator.epoch to be a whole"),
    ({"task_state": [1]}, "task_state to be a dictionary"),
    ({"last_optimizer_state": 1}, "last_optimizer_state to be a dictionary"),
    ({"last_optimizer_state": {"param_groups": True}}, "last_optimizer_state.param_groups to be a"),
])  # fmt: skip
def test_entries_of_another_type(tmp_path, changed, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        loaded(tmp_path, checkpoint(**changed))
    assert str(tmp_path / "checkpoint.pt") in str(caught.value)


def test_containers_of_omegaconf_are_read_as_dictionaries(tmp_path):
    """What they refer to is not looked up."""
    cfg = OmegaConf.create({"model": {"_name": "${nowhere}", "layers": "???"}, "task": {"a": [1]}})
    found = loaded(tmp_path, checkpoint(cfg=cfg))["cfg"]
    assert found == {"model": {"_name": "${nowhere}", "layers": "???"}, "task": {"a": [1]}}
    inner = OmegaConf.create({"_name": "${model._name}"})
    found = loaded(tmp_path, checkpoint(cfg={"model": inner}))["cfg"]
    assert found == {"model": {"_name": "${model._name}"}} and type(found["model"]) is dict


def test_damaged_containers_of_omegaconf(tmp_path):
    damaged = DictConfig({})
    damaged.__dict__["_content"] = 3
    with pytest.raises(CheckpointError, match="settings that omegaconf can read as cfg of"):
        loaded(tmp_path, checkpoint(cfg=damaged))
    with pytest.raises(CheckpointError, match="cfg to be a dictionary.*type str"):
        loaded(tmp_path, checkpoint(cfg=DictConfig("???")))
    assert loaded(tmp_path, checkpoint(cfg=DictConfig(None)))["cfg"] is None
    for name in ("extra_state", "last_optimizer_state", "task_state"):
        with pytest.raises(CheckpointError, match=f"{name} to be a dictionary.*DictConfig"):
            loaded(tmp_path, checkpoint(**{name: OmegaConf.create({"best": "???"})}))


HOSTILE = "print(1) or [1]"


@pytest.mark.parametrize("place", range(9))
def test_each_of_several_containers_is_looked_at(tmp_path, place):
    """Each becomes a dictionary that may be made where the one before it was."""
    nodes = {f"n{number}": DictConfig({"a": "1"}) for number in range(9)}
    nodes[f"n{place}"] = DictConfig({"adam_betas": HOSTILE})
    with pytest.raises(CheckpointError, match=f"the setting args.n{place}.adam_betas of"):
        loaded(tmp_path, checkpoint(args=argparse.Namespace(**nodes)))


@pytest.mark.parametrize("changed, name", [
    ({"args": argparse.Namespace(encoder_layers=HOSTILE)}, "args.encoder_layers"),
    ({"cfg": {"model": {"character_filters": HOSTILE}}}, "cfg.model.character_filters"),
    ({"cfg": {"optimizer": {"adam_betas": HOSTILE}}}, "cfg.optimizer.adam_betas"),
    ({"cfg": {"model": argparse.Namespace(arch="fconv_self_att", self_attention=HOSTILE)}},
     "cfg.model.self_attention"),
    ({"cfg": {"model": {"w2v_args": {"model": {"conv_feature_layers": HOSTILE}}}}},
     "cfg.model.w2v_args.model.conv_feature_layers"),
    ({"cfg": OmegaConf.create({"model": {"w2v": {"encoder_layers": HOSTILE}}})},
     "cfg.model.w2v.encoder_layers"),
    ({"args": argparse.Namespace(w2v=OmegaConf.create({"encoder_layers": HOSTILE}))},
     "args.w2v.encoder_layers"),
])  # fmt: skip
def test_settings_that_would_be_run_as_code_are_refused_by_name(tmp_path, changed, name):
    with pytest.raises(CheckpointError, match=f"the setting {name} of .*print.*run as code"):
        loaded(tmp_path, checkpoint(**changed))


@pytest.mark.parametrize("tensor, match", [
    (torch.ones(2, 2).to_sparse(), "a sparse tensor"),
    (torch.ones(2, 2, device="meta"), "on the device meta, without its numbers"),
    (torch.ones(2, 2, dtype=torch.complex64), "one of torch.complex64"),
    (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantized tensor"),
    pytest.param(
        torch.ones(2).to(torch.float8_e4m3fn) if hasattr(torch, "float8_e4m3fn") else None,
        "one of torch.float8_e4m3fn",
        marks=pytest.mark.skipif(
            not hasattr(torch, "float8_e4m3fn"), reason="this torch has no such type"
        ),
    ),
])  # fmt: skip
def test_tensors_that_nothing_here_computes_with(tmp_path, tensor, match):
    # Older versions of torch are not even let to build all of them.
    refused = rf"a dense tensor of numbers for w.*{match}|found the object torch\._utils\._rebuild"
    with pytest.raises(CheckpointError, match=refused):
        loaded(tmp_path, checkpoint(model={"w": tensor}))


def test_settings_that_refer_to_themselves_end(tmp_path):
    endless = {"decoder_layers": 3}
    endless["itself"] = endless
    assert loaded(tmp_path, checkpoint(cfg={"model": endless}))["cfg"]["model"]["itself"]


def test_settings_that_hold_one_container_often_are_refused(tmp_path):
    node = DictConfig({"a": 1})
    for _ in range(30):
        outer = DictConfig({})
        outer.__dict__["_content"].update(a=node, b=node)
        node = outer
    with pytest.raises(CheckpointError, match="at most 100,000 settings"):
        loaded(tmp_path, checkpoint(cfg=node))


SHARING = {
    "share_all_embeddings": ("encoder.embed_tokens", "decoder.embed_tokens"),
    "share_decoder_input_output_embed": ("decoder.embed_tokens", "decoder.output_projection"),
}


@pytest.mark.parametrize("setting", SHARING)
def test_equal_copies_of_another_type_are_one_table(setting, tmp_path):
    first, second = (f"{module}.weight" for module in SHARING[setting])
    table = torch.rand(20, 4)
    args = argparse.Namespace(arch="transformer", task="translation", **{setting: True})
    model = {first: table, second: table.double()}
    torch.save({"args": args, "model": model, "optimizer_history": []}, tmp_path / "c.pt")
    assert load_checkpoint(tmp_path / "c.pt")["model"].keys() == model.keys()


@pytest.mark.parametrize("setting", SHARING)
@pytest.mark.parametrize("entry", ["weight", "U"])
@pytest.mark.parametrize("change", ["value", "nan", "rows", "value in another type"])
def test_copies_of_a_shared_table_that_differ(setting, entry, change, tmp_path):
    first, second = (f"{module}.{entry}" for module in SHARING[setting])
    table = torch.rand(20, 4)
    changed = table.clone()
    if change == "rows":
        changed = table[:17].clone()
    else:
        changed[3, 1] = float("nan") if change == "nan" else 2
    if change == "value in another type":
        changed = changed.double()
    for shared, wrong in ((True, True), (True, False), (False, True)):
        state = {
            "args": argparse.Namespace(arch="transformer", task="translation", **{setting: shared}),
            "model": {first: table, second: changed if wrong else table.clone()},
            "optimizer_history": [{"num_updates": 7}],
        }
        torch.save(state, tmp_path / "c.pt")
        if shared and wrong:
            for read in (load_checkpoint, open_model):
                with pytest.raises(CheckpointError, match=f"{second} to equal {first}.*{setting}"):
                    read(tmp_path / "c.pt")
        else:
            load_checkpoint(tmp_path / "c.pt")
