"""Saved models load in plain transformers, and get their methods back."""

import copy
import shutil
import warnings

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq.training import (
    TablePenalty,
    TokenLoss,
    factor_,
    fused_loss_,
    mixture_,
    parameter_groups,
    plain_,
    plain_state_dict,
    restore_,
    weight_norm_,
)
from tests.covering import covering
from tests.training.models import IDS, LAYOUTS, WORDS, Straight, build, inputs

TABLES = {"weight-norm": weight_norm_, "svd": factor_}


def step(model, updates=2):
    """Train a little, so that the entries of a table are no longer those of its start."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        model.eval()(**inputs(model)).logits.logsumexp(-1).mean().backward()
        optimizer.step()
    return model.train()


def logits(model):
    with torch.no_grad():
        return model.eval()(**inputs(model)).logits


def loaded(model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = type(model).from_pretrained(folder)
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    for name, one in made.named_parameters():
        if name in frozen:  # transformers 5.24 trains the fixed positions of a loaded Marian
            one.requires_grad_(False)
    return made


def are_tied(model, layout):
    weights = {id(model.get_submodule(name).weight) for name in LAYOUTS[layout][1]}
    return len(weights) == 1


@pytest.mark.parametrize("layout, kind", covering(LAYOUTS, TABLES))
def test_it_loads_in_plain_transformers_and_goes_on_exactly(transformers, tmp_path, layout, kind):
    model = build(transformers, layout)
    TABLES[kind](model, **({"gamma": 0.7} if kind == "weight-norm" else {"c2": 0.01}))
    step(model)
    model.save_pretrained(tmp_path)
    plain = loaded(model, tmp_path)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    assert are_tied(plain, layout) and isinstance(plain.get_output_embeddings(), nn.Linear)
    assert plain.config.spectral_fairseq["table"]["kind"] == kind
    assert restore_(plain) is None
    table, other = (one.get_output_embeddings().used_table for one in (model, plain))
    assert torch.equal(logits(plain), logits(model))
    assert {**table.state_dict()}.keys() == {**other.state_dict()}.keys()
    assert all(
        torch.equal(one, other.state_dict()[name]) for name, one in table.state_dict().items()
    )
    option = "gamma" if kind == "weight-norm" else "prior_settings"
    assert getattr(table, option) == getattr(other, option)
    assert torch.equal(logits(step(plain)), logits(step(model)))
    with pytest.raises(ConfigurationError, match="one that has table"):
        restore_(plain, tmp_path)
    # Made plain, it says nothing of a method.
    plain_(plain)
    plain.save_pretrained(tmp_path / "plain")
    assert not hasattr(loaded(model, tmp_path / "plain").config, "spectral_fairseq")


@pytest.mark.parametrize("kind", TABLES)
def test_a_model_whose_parts_have_other_names_in_its_file(transformers, tmp_path, kind):
    """LLaVA's lm_head is language_model.lm_head there."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    image = {**sizes, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
    text = {**sizes, "model_type": "llama", "vocab_size": WORDS}
    config = transformers.LlavaConfig(vision_config=image, text_config=text, image_token_index=5)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    TABLES[kind](model)
    model.save_pretrained(tmp_path)
    plain = loaded(model, tmp_path)
    assert restore_(plain) is None
    expected, found = (one.get_output_embeddings().used_table for one in (model, plain))
    for name, entry in expected.state_dict().items():
        assert torch.equal(entry, found.state_dict()[name])
    trained = loaded(model, tmp_path)
    with torch.no_grad():
        trained.get_output_embeddings().weight += 1
    with pytest.raises(ConfigurationError, match="other numbers"):
        restore_(trained)


@pytest.mark.parametrize("kind", TABLES)
def test_each_checkpoint_of_a_training_has_the_table_of_its_time(transformers, tmp_path, kind):
    """A fused step, Trainer's default, changes parameters without a trace in their versions."""
    model = build(transformers)
    TABLES[kind](model)
    try:
        optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.1, fused=True)
    except (RuntimeError, TypeError):
        pytest.skip("this torch has no fused optimiser for a CPU")
    seen = []
    for update in range(3):
        optimizer.zero_grad()
        model.eval()(**inputs(model)).logits.logsumexp(-1).mean().backward()
        optimizer.step()
        model.save_pretrained(tmp_path / str(update))
        seen.append(logits(model))
    assert (seen[2] - seen[0]).abs().max() > 0.1
    for update in range(3):
        plain = loaded(model, tmp_path / str(update))
        torch.testing.assert_close(logits(plain), seen[update], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mos", "moc"])
@pytest.mark.parametrize("table", [None, weight_norm_])
def test_mixtures(transformers, tmp_path, kind, table):
    """Without its mixture it is another model; transformers names the entries it leaves out."""
    model = build(transformers)
    if table is not None:
        table(model)
    mixture_(model, 3, kind=kind, context_scale=2.0)
    step(model)
    model.save_pretrained(tmp_path)
    other = loaded(model, tmp_path)
    assert (logits(other) - logits(model)).abs().max() > 0.1
    loss = restore_(other, label_smoothing=0.1)
    assert torch.equal(logits(other), logits(model)) and loss.label_smoothing == 0.1
    assert torch.equal(logits(copy.deepcopy(other)), logits(model))


def test_parameters_keep_their_order(transformers, tmp_path):
    """The state of an optimiser is kept by the order of the parameters."""
    model = build(transformers, "llama")
    mixture_(model, 3)
    weight_norm_(model)
    model.save_pretrained(tmp_path)
    other = loaded(model, tmp_path)
    restore_(other)
    names = [name for name, _ in other.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert "lm_head.table.v" in names and "lm_head.mixture.prior.weight" in names


def test_caps(transformers, tmp_path):
    model = build(transformers)
    fused_loss_(model, softcap=0.05)
    model.save_pretrained(tmp_path)
    other = loaded(model, tmp_path)
    assert float(logits(other).abs().max()) > 0.05
    loss = restore_(other)
    assert torch.equal(logits(other), logits(model))
    own = model.train()(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(loss(other.train()(input_ids=IDS), IDS), own)


def test_a_fused_loss_alone_is_no_part_of_a_model(transformers, tmp_path):
    model = build(transformers)
    fused_loss_(model)
    model.save_pretrained(tmp_path)
    other = loaded(model, tmp_path)
    assert torch.equal(logits(other), logits(model)) and not hasattr(
        other.config, "spectral_fairseq"
    )
    assert restore_(other) is None
    with pytest.raises(ConfigurationError, match="fused_loss_ with them"):
        restore_(other, label_smoothing=0.1)


def test_files_in_parts_and_wrong_folders(transformers, tmp_path):
    model = build(transformers)
    weight_norm_(model)
    model.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    other = loaded(model, tmp_path / "parts")
    restore_(other)
    assert torch.equal(logits(other), logits(model))
    other = loaded(model, tmp_path / "parts")
    with pytest.raises(ConfigurationError, match="no config.json"):
        restore_(other, tmp_path)
    build(transformers).save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="table"):
        restore_(other, tmp_path / "plain")


@pytest.mark.parametrize("kind", TABLES)
def test_what_was_learned_after_loading_is_not_thrown_away(transformers, tmp_path, kind):
    """The table of the file came back in silence, and a resized model was left half changed."""
    model = build(transformers)
    TABLES[kind](model)
    step(model).save_pretrained(tmp_path / "saved")
    trained, resized = loaded(model, tmp_path / "saved"), loaded(model, tmp_path / "saved")
    step(trained)
    resized.resize_token_embeddings(68)
    for changed, found in ((trained, "as after training"), (resized, r"shape \(68, 16\)")):
        before = logits(changed)
        with pytest.raises(ConfigurationError, match=f"{found}.*weight_norm_"):
            restore_(changed)
        assert torch.equal(logits(changed), before)
        assert type(changed.lm_head) is nn.Linear
        TABLES[kind](changed)  # the remedy
        torch.testing.assert_close(logits(changed), before, rtol=1e-4, atol=1e-4)
    # Saved by plain transformers, the settings still name the method.
    again = step(loaded(model, tmp_path / "saved"))
    again.save_pretrained(tmp_path / "again")
    other = loaded(model, tmp_path / "again")
    with pytest.raises(CheckpointError, match="saved again as a plain model.*config.json"):
        restore_(other)
    assert torch.equal(logits(other), logits(again)) and type(other.lm_head) is nn.Linear
    # Training of other parts is kept.
    partly = loaded(model, tmp_path / "saved")
    with torch.no_grad():
        partly.transformer.h[0].attn.c_attn.weight.mul_(1.5)
    before = logits(partly)
    restore_(partly)
    torch.testing.assert_close(logits(partly), before, rtol=1e-5, atol=1e-5)


def test_parts_of_an_earlier_save_are_not_taken_for_the_model(transformers, tmp_path):
    """transformers loads the single file; the table was put together from both saves."""
    pytest.importorskip("safetensors")
    model = build(transformers)
    weight_norm_(model)
    step(model).save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    step(model).save_pretrained(tmp_path / "whole")
    for path in (tmp_path / "parts").iterdir():
        if path.name.startswith("model"):
            shutil.copy(path, tmp_path / "whole")
    plain = loaded(model, tmp_path / "whole")
    restore_(plain)
    assert torch.equal(logits(plain), logits(model))
    next((tmp_path / "parts").glob("model-00002*")).unlink()
    (tmp_path / "whole" / "config.json").replace(tmp_path / "parts" / "config.json")
    again = build(transformers)
    again.config.spectral_fairseq = plain.config.spectral_fairseq
    with pytest.raises(CheckpointError, match=r"'model-00002-of-0000\d.safetensors', no such file"):
        restore_(again, tmp_path / "parts")


def test_a_model_of_the_hub_is_found_where_it_was_downloaded(transformers, tmp_path, monkeypatch):
    """Its name was taken for a folder."""
    model = build(transformers)
    weight_norm_(model)
    commit = "0" * 40
    downloaded = tmp_path / "models--user--name"
    model.save_pretrained(downloaded / "snapshots" / commit)
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text(commit)
    for module in ("transformers.utils.hub", "huggingface_hub.constants"):
        for name in ("TRANSFORMERS_CACHE", "HF_HUB_CACHE"):
            monkeypatch.setattr(f"{module}.{name}", str(tmp_path), raising=False)
    loaded = type(model).from_pretrained("user/name", local_files_only=True)
    restore_(loaded)
    torch.testing.assert_close(loaded.lm_head.used_table.g, model.lm_head.used_table.g)
    loaded = type(model).from_pretrained("user/name", local_files_only=True)
    shutil.rmtree(downloaded)
    with pytest.raises(ConfigurationError, match=r"snapshot_download\(name\)"):
        restore_(loaded)


def test_settings_of_another_kind_are_warned_of():
    class Model(nn.Module):
        config = None

        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(4, 9, bias=False)

        def save_pretrained(self, folder, state_dict=None):
            return self.state_dict() if state_dict is None else state_dict

    model = Model()
    assert set(model.save_pretrained("")) == {"lm_head.weight"}
    weight_norm_(model)
    with pytest.warns(UserWarning, match="does not say that table"):
        found = model.save_pretrained("")
    torch.testing.assert_close(found["lm_head.weight"], model.lm_head.weight.detach())
    plain_(model)
    assert set(model.save_pretrained("")) == {"lm_head.weight"}


@pytest.mark.parametrize("wrap", ["compile", "DataParallel", "both"])
def test_a_plain_state_has_the_names_of_the_model_without_wrappers(wrap):
    model = Straight(tied=True)
    factor_(model)
    made = torch.nn.DataParallel(model) if wrap != "compile" else model
    if wrap != "DataParallel":
        if not hasattr(torch, "compile"):
            pytest.skip("this torch has no compile")
        made = torch.compile(made, backend="eager")
    Straight(tied=True).load_state_dict(plain_state_dict(made))


@pytest.mark.parametrize("method", [mixture_, fused_loss_])
@pytest.mark.parametrize("table", [weight_norm_, factor_])
def test_a_refused_loss_leaves_the_model_as_it_was_loaded(transformers, tmp_path, table, method):
    """A table stayed on it, so that the right options were refused as well."""
    model = build(transformers)
    table(model)
    method(model, **({"components": 2} if method is mixture_ else {"softcap": 3.0}))
    step(model)
    model.save_pretrained(tmp_path)
    plain = loaded(model, tmp_path)
    kinds = [type(layer) for layer in plain.modules()]
    before = {name: one.clone() for name, one in plain.state_dict().items()}
    for options in ({"z_loss": -1.0}, {"penalty": TablePenalty(build(transformers), cosine=1.0)}):
        with pytest.raises(ConfigurationError):
            restore_(plain, **options)
        assert [type(layer) for layer in plain.modules()] == kinds
        assert all(torch.equal(before[name], one) for name, one in plain.state_dict().items())
    assert isinstance(restore_(plain), TokenLoss)
    assert torch.equal(logits(plain), logits(model))


@pytest.mark.parametrize(
    "table, method",
    [
        (weight_norm_, None),
        (factor_, None),
        (None, mixture_),
        (weight_norm_, mixture_),
        (factor_, fused_loss_),
    ],
)
@pytest.mark.parametrize("damage", ["missing", "of another shape"])
def test_a_damaged_file_leaves_the_model_as_it_was_loaded(
    transformers, tmp_path, table, method, damage
):
    """The methods stayed on it, with entries that were made up."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = build(transformers)
    if table is not None:
        table(model)
    if method is not None:
        method(model, **({"components": 2} if method is mixture_ else {"softcap": 3.0}))
    step(model).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    entries = safetensors.load_file(file)
    own = [name for name in entries if ".table." in name or ".mixture." in name]
    last = entries.pop(own[-1])
    if damage == "of another shape":
        entries[own[-1]] = torch.cat([last, last])
    safetensors.save_file(entries, file, {"format": "pt"})
    plain = loaded(model, tmp_path)
    kinds = [type(layer) for layer in plain.modules()]
    before = {name: one.clone() for name, one in plain.state_dict().items()}
    for _ in range(2):
        with pytest.raises(CheckpointError, match="entries of the methods"):
            restore_(plain)
    assert [type(layer) for layer in plain.modules()] == kinds
    state = plain.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(before[name], one) for name, one in state.items())
