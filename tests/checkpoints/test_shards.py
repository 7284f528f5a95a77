"""Models in parts: the whole table is measured, or the file is refused as one of several."""

import argparse
import json

import numpy as np
import pytest
import torch

from spectral_fairseq.analysis import analyze
from spectral_fairseq.checkpoints.shards import parts_of
from spectral_fairseq.errors import CheckpointError
from tests.checkpoints.made import cone

DIM = 6
INPUT, OUTPUT = cone(200, DIM, seed=1), cone(200, DIM, seed=2)
NORM = torch.arange(1.0, DIM + 1)


def measured(model, **options):
    (found,) = analyze(model, **options).to_dict()["checkpoints"]
    return found


def is_table(found, table):
    """Whether these are the figures of a table: its size, its scale, and where its rows point."""
    (expected,) = analyze(table).to_dict()["checkpoints"]
    assert (found["table"]["rows"], found["table"]["dimensions"]) == tuple(table.shape)
    sigma, cosine = expected["singular_values"], expected["measures"]["mean_cosine"]
    return found["singular_values"] == pytest.approx(sigma, rel=1e-5) and (
        found["measures"]["mean_cosine"] == pytest.approx(cosine, abs=1e-6)
    )


def refused(model, message, **options):
    """No table of the model is measured, and the error says why."""
    with pytest.raises(CheckpointError, match=message):
        analyze(model, **options)


def piece(rank, count=2, **tables):
    """What one of parallel processes has: its rows of the tables, and the whole norm."""
    mine = {f"{name}.weight": table.chunk(count)[rank].clone() for name, table in tables.items()}
    return {**mine, "norm.weight": NORM}


def saved(path, content):
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path)
    return path


def llama(folder, count=4, by="rows", settings=True, files=None):
    """Parallel files of Llama 3, or of Llama 2, which splits the columns of the input."""
    for number in range(count) if files is None else files:
        part = {**piece(number, count, output=OUTPUT), "layers.0.wq.weight": torch.randn(3, DIM)}
        inputs = INPUT.chunk(count, 0 if by == "rows" else 1)[number]
        part["tok_embeddings.weight"] = inputs.clone()
        torch.save(part, folder / f"consolidated.{number:02}.pth")
    if settings:
        vocab = 200 if by == "rows" else -1
        (folder / "params.json").write_text(
            json.dumps({"dim": DIM, "n_heads": 2, "norm_eps": 1e-5, "vocab_size": vocab})
        )
    return folder


@pytest.mark.parametrize("settings", [True, False])
@pytest.mark.parametrize("by, count", [("rows", 4), ("rows", 2), ("columns", 2), ("columns", 3)])
@pytest.mark.parametrize("named", ["", "consolidated.00.pth", "consolidated.01.pth"])
def test_the_parallel_files_of_llama(named, by, count, settings, tmp_path):
    path = llama(tmp_path, count, by, settings) / named
    found = measured(path)
    assert found["table"]["name"] == "output" and is_table(found, OUTPUT)
    assert f"Read from {count} files, consolidated.00.pth" in found["table"]["choice"]
    assert is_table(measured(path, table="tok_embeddings"), INPUT)
    refused(path, f"wq.weight: each of {count} files has a piece", table="layers.0.wq")


def test_one_file_of_llama_is_a_whole(tmp_path):
    assert is_table(measured(llama(tmp_path, 1) / "consolidated.00.pth"), OUTPUT)


@pytest.mark.parametrize(
    "files, named, message",
    [
        ([0], 0, "a table of 200 words.*50 x 6"),
        ([1], 1, "all of the at least 2 files"),
        ([0, 2], 0, "all of the at least 3 files"),
        ([0, 1, 3], 3, "all of the at least 4 files"),
        ([0, 1], 0, "a table of 200 words.*100 x 6"),
    ],
)
def test_missing_files_of_llama(files, named, message, tmp_path):
    folder = llama(tmp_path, 4, files=files)
    refused(folder / f"consolidated.{named:02}.pth", message)


def test_a_narrow_part_of_llama(tmp_path):
    path = llama(tmp_path, 2, "columns", files=[0]) / "consolidated.00.pth"
    part = torch.load(path)
    del part["output.weight"]
    torch.save(part, path)
    refused(path, "a table of vectors of 6 numbers.*200 x 3")


@pytest.mark.parametrize("name", ["output.weight", "lm_head.weight"])
def test_a_part_of_an_output_layer_beside_the_whole_input(name):
    for count in (2, 4):
        model = {"tok_embeddings.weight": INPUT, name: OUTPUT.chunk(count)[0]}
        refused(model, f"{name}: {200 // count} rows, a part of 200")
    # Languages may have vocabularies of their own.
    model = {"encoder.embed_tokens.weight": INPUT, "decoder.output_projection.weight": OUTPUT[:100]}
    assert is_table(measured(model), OUTPUT[:100])


@pytest.mark.parametrize("words, whole", [(50, True), (200, False)])
def test_an_output_layer_beside_the_codebooks(words, whole, tmp_path):
    """The settings tell the layer of one codebook of 50 rows from a quarter of a layer of 200."""
    model = {"audio.embed_tokens.weight": INPUT, "lm_head.weight": OUTPUT[:50].clone()}
    torch.save(model, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {words}, "num_codebooks": 4}}')
    if whole:
        assert is_table(measured(tmp_path), OUTPUT[:50])
    else:
        refused(tmp_path, "50 rows, a part of 200")


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("first", [0, 1])
def test_numbered_files_without_an_index(form, first, tmp_path):
    """The output layer is in the second file, whichever is named."""
    save = torch.save
    if form == "safetensors":
        save = pytest.importorskip("safetensors.torch").save_file
    stem = "model" if form == "safetensors" else "pytorch_model"
    parts = {"model.embed_tokens.weight": INPUT}, {"lm_head.weight": OUTPUT}
    paths = [tmp_path / f"{stem}-{first + n:05}-of-00002.{form}" for n in range(2)]
    for path, part in zip(paths, parts):
        save(part, path)
    (tmp_path / "config.json").write_text('{"vocab_size": 200, "tie_word_embeddings": false}')
    for path in (tmp_path, *paths):
        found = measured(path)
        assert found["table"]["name"] == "lm_head" and is_table(found, OUTPUT)
    paths[1].unlink()
    refused(paths[0], f"all of the (00002|2) files.*{paths[0].name}.*1")


def megatron(vocab, inputs, output=None, **sizes):
    model = {"embedding": {"word_embeddings": {"weight": inputs.clone()}}}
    model["encoder"] = {"layers.0.mlp.weight": torch.randn(3, DIM), "final_norm.weight": NORM}
    if output is not None:
        model["output_layer"] = {"weight": output.clone()}
    args = argparse.Namespace(padded_vocab_size=vocab, **sizes)
    return {"args": args, "iteration": 7, "model": {"language_model": model}}


@pytest.mark.parametrize("untied", [True, False])
def test_the_parallel_files_of_megatron(untied, tmp_path):
    for rank in range(4):
        output = OUTPUT.chunk(4)[rank] if untied else None
        part = megatron(200, INPUT.chunk(4)[rank], output, tensor_model_parallel_size=4)
        saved(tmp_path / f"mp_rank_{rank:02}" / "model_optim_rng.pt", part)
    path = tmp_path / "mp_rank_02" / "model_optim_rng.pt"
    found = measured(path)
    assert is_table(found, OUTPUT if untied else INPUT)
    # The settings tell where the names do not.
    alone = tmp_path / "model.pt"
    alone.write_bytes(path.read_bytes())
    refused(alone, "all of the 4 files of which .*model.pt is one")
    torch.save(megatron(200, INPUT.chunk(4)[0]), alone)
    refused(alone, "a table of 200 words.*50 x 6")


def test_stages_of_a_pipeline(tmp_path):
    for tensor in range(2):
        for stage, table in enumerate(({"embed_tokens": INPUT}, {"output_layer": OUTPUT})):
            part = {"layers.0.weight": torch.randn(3, DIM), **piece(tensor, **table)}
            saved(tmp_path / f"mp_rank_{tensor:02}_{stage:03}" / "model_rng.pt", {"model": part})
    assert is_table(measured(tmp_path / "mp_rank_00_000" / "model_rng.pt"), OUTPUT)


def fairseq(tensors, **common):
    task = {"_name": "language_modeling", "data": ""}
    cfg = {"common": common, "task": task, "model": {"_name": "transformer_lm"}}
    return {"cfg": cfg, "model": tensors, "extra_state": {}}


def test_the_parallel_files_of_fairseq(tmp_path):
    paths = [tmp_path / f"checkpoint_1_50-model_part-{rank}.pt" for rank in range(2)]
    for rank, path in enumerate(paths):
        part = piece(rank, **{"decoder.output_projection": OUTPUT, "decoder.embed_tokens": INPUT})
        torch.save(fairseq(part, model_parallel_size=2), path)
    found = measured(paths[1])
    assert found["table"]["rows"] == 200 and found["table"]["words"] == 199
    assert found["table"]["name"] == "decoder.output_projection"
    paths[1].unlink()
    refused(paths[0], "all of the 2 files.*model_part-0")


def test_experts_of_fairseq_share_their_tables(tmp_path):
    for rank in range(2):
        part = {"decoder.embed_tokens.weight": INPUT, "decoder.experts.weight": torch.randn(9, 3)}
        torch.save(fairseq(part), tmp_path / f"checkpoint_last-rank-{rank}.pt")
    assert measured(tmp_path / "checkpoint_last-rank-0.pt")["table"]["rows"] == 200


def test_parts_in_an_order_that_is_not_known(tmp_path):
    for rank in range(2):
        torch.save(piece(rank, lm_head=OUTPUT), tmp_path / f"checkpoint-rank-{rank}.pt")
        np.save(tmp_path / f"table-{rank:05}-of-00002.npy", OUTPUT.chunk(2)[rank].numpy())
    refused(tmp_path / "checkpoint-rank-1.pt", "lm_head.weight: each of 2 files has a piece")
    refused(tmp_path / "table-00000-of-00002.npy", "array: each of 2 files has a piece")


SHARDED = {
    "fsdp of fairseq": fairseq({"decoder.flat_param_0": torch.randn(99)}),
    "zero, stage 3": {
        "module": {"lm_head.weight": torch.zeros(0), "norm.weight": torch.zeros(0)},
        "param_shapes": [],
    },
    "zero, moments": {"optimizer_state_dict": {"zero_stage": 2, "fp32_flat_groups": []}},
}


@pytest.mark.parametrize("form", SHARDED)
def test_what_one_process_saves_of_flat_parameters(form, tmp_path):
    torch.save(SHARDED[form], tmp_path / "file.pt")
    refused(tmp_path / "file.pt", "the weights of a whole model.*one process")


def test_parts_that_are_numbered_from_one(tmp_path):
    paths = [tmp_path / f"shard_{number}.pt" for number in (1, 2, 4)]
    for path in paths[:2]:
        path.write_bytes(b"a")
    assert parts_of(paths[1]) == paths[:2]
    paths[2].write_bytes(b"a")
    with pytest.raises(CheckpointError, match="all of the at least 4 files.*found 3"):
        parts_of(paths[0])


@pytest.mark.parametrize("name, other", [
    ("rank-8.pt", "rank-16.pt"),
    ("shard3.pt", "shard9.pt"),
    ("lora_rank_1/model.pt", "lora_rank_2/model.pt"),  # trainings
])  # fmt: skip
def test_numbers_that_are_no_parts(name, other, tmp_path):
    saved(tmp_path / other, {"lm_head.weight": INPUT})
    assert is_table(measured(saved(tmp_path / name, {"lm_head.weight": OUTPUT})), OUTPUT)


def test_the_settings_beside_a_table_that_is_named(tmp_path):
    torch.save({"lm_head.weight": OUTPUT[:50].clone()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 200}}')
    refused(tmp_path, "a table of 200 words.*50 x 6")
    choice = measured(tmp_path, table="lm_head")["table"]["choice"]
    assert "50 x 6, and the settings say 200 words" in choice


def test_one_rank_of_a_model_in_layers(tmp_path):
    """Files of DeepSpeed's pipeline: one for each layer and process."""
    first, second = (tmp_path / f"layer_00-model_0{rank}-model_states.pt" for rank in range(2))
    for path in (first, second):
        saved(path, {"word_embeddings.weight": torch.rand(100, 16)})
    for path in (first, second):
        refused(path, "each of 2 files has a piece")
    first.unlink()
    refused(second, "all of the at least 2 files")
    second.unlink()
    choice = measured(saved(first, {"word_embeddings.weight": INPUT}))["table"]["choice"]
    assert "one layer of the model" in choice and "No output layer" not in choice


TENSORS = {"model.embed_tokens.weight": INPUT, "lm_head.weight": OUTPUT}


def numbered(folder, count, tensors):
    """``count`` files, of which each holds one of the tensors."""
    names = [f"pytorch_model-{n + 1:05}-of-{count:05}.bin" for n in range(count)]
    for name, (key, value) in zip(names, tensors.items()):
        torch.save({key: value}, folder / name)
    return names


def index_of(folder, weight_map):
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return path


def test_numbered_files_of_two_models_in_one_folder(tmp_path):
    two = numbered(tmp_path, 2, TENSORS)
    assert is_table(measured(tmp_path), OUTPUT)
    three = numbered(tmp_path, 3, {**dict(zip(TENSORS, (OUTPUT, INPUT))), "bias": NORM})
    refused(tmp_path, "numbered files of 2 and of 3")
    assert is_table(measured(tmp_path / two[1]), OUTPUT)
    assert is_table(measured(tmp_path / three[0]), INPUT)
    (tmp_path / three[2]).unlink()
    refused(tmp_path / three[0], "all of the 3 files")


def test_a_file_that_an_index_beside_it_names_as_one_of_several(tmp_path):
    """The input was measured, as if there were no output layer."""
    names = dict(zip(TENSORS, ("first.bin", "second.bin")))
    for key, name in names.items():
        torch.save({key: TENSORS[key]}, tmp_path / name)
    (tmp_path / "other.index.json").write_text("no JSON", "utf-8")
    index_of(tmp_path, names)
    found = measured(tmp_path / "first.bin")
    assert is_table(found, OUTPUT) and "bin.index.json names" in found["table"]["choice"]
    (tmp_path / "second.bin").unlink()
    refused(tmp_path / "first.bin", "'second.bin', no such file")
    index_of(tmp_path, dict.fromkeys(names, "first.bin"))  # of one file, which is a whole
    torch.save(TENSORS, tmp_path / "first.bin")
    assert is_table(measured(tmp_path / "first.bin"), OUTPUT)


def test_an_output_layer_in_several_files_that_lies_the_other_way_round(tmp_path):
    tensors = {"wte.weight": INPUT, "lm_head.weight": OUTPUT.t().contiguous()}
    index_of(tmp_path, dict(zip(tensors, numbered(tmp_path, 2, tensors))))
    assert is_table(measured(tmp_path), OUTPUT)


def test_an_index_that_leaves_something_out(tmp_path):
    names = numbered(tmp_path, 2, TENSORS)
    index_of(tmp_path, {"model.embed_tokens.weight": names[0]})
    refused(tmp_path, "no tensor of pytorch_model-00002-of-00002.bin")
    torch.save({"lm_head.weight": OUTPUT, "bias": NORM}, tmp_path / names[1])
    index_of(tmp_path, {"model.embed_tokens.weight": names[0], "bias": names[1]})
    assert is_table(measured(tmp_path), OUTPUT)


def test_one_file_is_preferred_to_an_index_as_in_transformers(tmp_path):
    names = numbered(tmp_path, 2, dict(zip(TENSORS, (OUTPUT, INPUT))))
    index_of(tmp_path, dict(zip(TENSORS, names)))
    assert is_table(measured(tmp_path), INPUT)
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    assert is_table(measured(tmp_path), OUTPUT)


@pytest.mark.parametrize("name", ["model_{}.pt", "gpu{}_step9.pt"])
@pytest.mark.parametrize(
    "norms, message", [("alike", "parallel processes"), ("trained", None), ("frozen", None)]
)
def test_files_whose_names_differ_in_a_number_only(name, norms, message, tmp_path):
    """Files of parallel processes have the same norms; checkpoints of a training have others."""
    paths, tables = [tmp_path / name.format(rank) for rank in range(2)], OUTPUT.chunk(2)
    if norms == "frozen":  # with all but the table
        tables = OUTPUT, OUTPUT + 0.1 * torch.randn(200, DIM)
    for rank, path in enumerate(paths):
        norm = NORM + (rank if norms == "trained" else 0)
        torch.save({"lm_head.weight": tables[rank].clone(), "norm.weight": norm}, path)
    for path, table in zip(paths, tables):
        if message is not None:
            refused(path, message)
        else:
            assert is_table(measured(path), table)
    if norms != "frozen":
        torch.save({"other": NORM, "norm.weight": NORM}, paths[1])
        assert is_table(measured(paths[0]), tables[0])
