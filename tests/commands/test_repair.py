"""Rows that training never reached get new vectors, in every kind of model."""

import collections
import shutil

import pytest
import torch

from spectral_fairseq.checkpoints.opening import open_model
from spectral_fairseq.checkpoints.reading import load_checkpoint, read_torch_file
from spectral_fairseq.checkpoints.table_entries import dense_form, entries_by_module, factored_kind
from spectral_fairseq.provenance import skip_broken_torchaudio

ZERO, SAME = 9, 12


def table_of(model, name="encoder.embed_tokens"):
    entries = entries_by_module(model)[name]
    kind = factored_kind(entries)
    return dense_form(kind, entries) if kind else entries["weight"].double()


def damaged(path, to, kind):
    """A checkpoint of which two words' vectors are zero, and equal to another one's."""
    checkpoint = load_checkpoint(path)
    for name, value in checkpoint["model"].items():
        if "embed_tokens" in name and value.dim() and len(value) > SAME and "V" not in name:
            value[ZERO] = 0
            value[SAME] = value[SAME + 1]
    torch.save(checkpoint, to)
    return to


@pytest.mark.parametrize("arch", ["transformer", "transformer_sc", "transformer_wn"])
def test_a_fairseq_checkpoint_is_repaired(train, arch, command, tmp_path):
    folder = train(arch, "cross_entropy", "--share-all-embeddings")
    path = damaged(folder / "checkpoint_last.pt", tmp_path / "damaged.pt", arch)
    before, original = load_checkpoint(path)["model"], path.read_bytes()
    out = tmp_path / "repaired.pt"
    printed = command("repair", path, "--out", out)
    assert "rows to repair" in printed and "before" in printed and path.read_bytes() == original
    checkpoint = load_checkpoint(out)
    after = checkpoint["model"]
    assert "last_optimizer_state" not in checkpoint and after.keys() == before.keys()
    old, new = table_of(before), table_of(after)
    kept = (new - old).abs().amax(1) < 1e-5
    rows = (~kept).nonzero().squeeze(1).tolist()
    assert {ZERO, SAME, SAME + 1} <= set(rows) and len(rows) < 8 and max(rows) < 44  # made up
    kept[[1, *range(44, len(kept))]] = False
    spread, mean = old[kept].std(0), old[kept].mean(0)
    assert (((new[rows] - mean) / spread).abs() < 0.2).all()
    torch.testing.assert_close(new[kept], old[kept], rtol=1e-5, atol=1e-6)
    assert new[1].abs().max() == old[1].abs().max()  # padding
    for name, value in before.items():
        if "embed_tokens" not in name and "output_projection" not in name:
            assert torch.equal(value, after[name]), name
    tables = [name for name in after if name.endswith(("embed_tokens.weight", "projection.weight"))]
    assert all(torch.equal(after[name], after[tables[0]]) for name in tables)


def test_a_model_of_transformers_is_repaired(command, tmp_path):
    pytest.importorskip("safetensors")
    skip_broken_torchaudio()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=60, num_attention_heads=2, tie_word_embeddings=False, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    model.lm_head.weight.data[ZERO] = 0
    model.model.embed_tokens.weight.data[ZERO] = 0
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("kept", "utf-8")
    before = {key: value.clone() for key, value in open_model(tmp_path / "model").tensors.items()}
    out = tmp_path / "repaired"
    printed = command("repair", tmp_path / "model", "--out", out, "--fill", "normal")
    assert printed.count(": 1 rows to repair") == 2
    loaded = transformers.LlamaForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight[ZERO].norm() > 0.01
    assert (out / "notes.txt").read_text("utf-8") == "kept"
    for name, value in open_model(out).tensors.items():
        rows = [row for row in range(len(value)) if row != ZERO]
        assert torch.equal(value[rows], before[name][rows]), name
    single = shutil.copyfile(tmp_path / "model" / "model.safetensors", tmp_path / "one.safetensors")
    one = tmp_path / "two.safetensors"
    command("repair", single, "--out", one, "--rows", "zero")
    assert open_model(one).tensors["lm_head.weight"][ZERO].norm() > 0


def test_state_dicts_of_torch_are_repaired(command, tmp_path):
    """``pytorch_model.bin`` of a folder, a file alone, and none that holds more than weights."""
    torch.manual_seed(0)
    table, bias = torch.rand(60, 8), torch.rand(60)
    table[ZERO] = 0
    names = ("model.embed_tokens.weight", "lm_head.weight")  # tied: one tensor under two names
    state = collections.OrderedDict({**dict.fromkeys(names, table), "lm_head.bias": bias})
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", "utf-8")
    torch.save(state, model / "pytorch_model.bin")
    for source, out in (
        (model, tmp_path / "repaired"),
        (model / "pytorch_model.bin", tmp_path / "one.pt"),
    ):
        command("repair", source, "--out", out)
        file = out / "pytorch_model.bin" if source is model else out
        found, _ = read_torch_file(file)
        assert list(found) == list(state) and torch.equal(found["lm_head.bias"], bias)
        assert found[names[0]][ZERO].norm() > 0.01
        assert torch.equal(found[names[0]], found[names[1]])
    torch.save({"state_dict": state, "optimizer": {}}, tmp_path / "loop.pt")
    error = command("repair", tmp_path / "loop.pt", "--out", tmp_path / "no.pt", rc=2)
    assert "a state dict that torch saved" in error
    assert not (tmp_path / "no.pt").exists()


def test_a_part_of_a_model_is_not_repaired_alone(command, tmp_path):
    """The file that was written held the changed tensors of all parts, and the others of one."""
    save = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(0)
    tables = {"model.embed_tokens.weight": torch.rand(60, 8), "lm_head.weight": torch.rand(60, 8)}
    for number, (name, table) in enumerate(tables.items(), 1):
        table[ZERO] = 0
        save({name: table}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    first, out = tmp_path / "model-00001-of-00002.safetensors", tmp_path / "out"
    error = command("repair", first, "--out", out, rc=2)
    assert "Give the model's folder" in error and not out.exists()
    command("repair", tmp_path, "--out", out)
    for name, table in open_model(out).tensors.items():
        assert table[ZERO].norm() > 0.01, name


def test_what_is_not_found_is_not_written(train, command, tmp_path):
    folder, out = train("transformer", "cross_entropy", "--share-all-embeddings"), tmp_path / "out"
    repair = ("repair", folder / "checkpoint_last.pt", "--out", out)
    assert "--initial-length" in command(*repair, "--rows", "initial", rc=2)
    assert "Choose one with --table" in command(*repair, "--table", "none", rc=2)
    assert "nothing was written" in command(*repair, "--rows", "long") and not out.exists()
