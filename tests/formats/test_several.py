"""Models in several files: the whole table is measured, and a part of one is refused by name."""

import argparse
import json

import numpy as np
import pytest
import torch

from spectral_fairseq.analysis import analyze
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


# Names of files of parallel processes, of which {} numbers the process.
OF_PROCESSES = {
    "Llama": "consolidated.{:02}.pth",
    "Megatron": "mp_rank_{:02}/model_optim_rng.pt",
    "Megatron, of a pipeline": "mp_rank_00_{:03}/model_optim_rng.pt",
    "DeepSpeed": "mp_rank_{:02}_model_states.pt",
    "fairseq": "checkpoint_best-model_part-{}.pt",
    "fairseq's experts": "checkpoint_last-rank-{}.pt",
    "fairseq's shards": "checkpoint_last-shard{}.pt",
    "devices": "gpu{}_step9.pt",
    "tensor parallelism": "tp_rank_{:02}.pt",
}


@pytest.mark.parametrize("form", OF_PROCESSES)
def test_a_file_of_one_of_several_processes_is_refused(form, tmp_path):
    """A part of a table must not be measured as the whole."""
    paths = [tmp_path / OF_PROCESSES[form].format(rank) for rank in range(2)]
    for rank, path in enumerate(paths):
        saved(path, piece(rank, lm_head=OUTPUT))
    for path in paths:
        refused(path, "a whole model in .*2 parts, by the names beside .*converter")
        refused(path, "converter", table="lm_head")


@pytest.mark.parametrize("form", ["Llama", "Megatron", "DeepSpeed", "fairseq"])
def test_a_later_part_alone_is_refused_and_the_first_is_a_whole(form, tmp_path):
    second, first = (tmp_path / OF_PROCESSES[form].format(rank) for rank in (1, 0))
    refused(saved(second, {"lm_head.weight": OUTPUT}), "numbers.*converter")
    second.unlink()
    if second.parent != tmp_path:
        second.parent.rmdir()
    assert is_table(measured(saved(first, {"lm_head.weight": OUTPUT})), OUTPUT)


def test_one_layer_of_a_pipeline_is_refused(tmp_path):
    path = tmp_path / "layer_00-model_00-model_states.pt"
    refused(saved(path, {"word_embeddings.weight": INPUT}), "one layer of a pipeline")


def params(folder, vocab=200):
    """The settings beside Llama's files."""
    settings = {"dim": DIM, "n_heads": 2, "norm_eps": 1e-5, "vocab_size": vocab}
    (folder / "params.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    "vocab, part, message",
    [
        (200, {"output.weight": OUTPUT[:50].clone()}, "a table of 200 words.*50 x 6"),
        (-1, {"tok_embeddings.weight": INPUT[:, :3].clone()}, "vectors of 6 numbers.*200 x 3"),
    ],
)
def test_the_first_part_of_llama_alone_is_refused_by_its_settings(vocab, part, message, tmp_path):
    params(tmp_path, vocab)
    refused(saved(tmp_path / "consolidated.00.pth", part), message)


@pytest.mark.parametrize("named", ["", "consolidated.00.pth"])
def test_one_file_of_llama_is_a_whole(named, tmp_path):
    params(tmp_path)
    whole = {"tok_embeddings.weight": INPUT, "output.weight": OUTPUT}
    saved(tmp_path / "consolidated.00.pth", whole)
    assert is_table(measured(tmp_path / named), OUTPUT)


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


def fairseq(tensors, **common):
    task = {"_name": "language_modeling", "data": ""}
    cfg = {"common": common, "task": task, "model": {"_name": "transformer_lm"}}
    return {"cfg": cfg, "model": tensors, "extra_state": {}}


OF_SETTINGS = {
    "Megatron": {
        "args": argparse.Namespace(padded_vocab_size=200, tensor_model_parallel_size=4),
        "model": piece(0, 4, output_layer=OUTPUT),
    },
    "stages": {
        "args": argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
        "model": piece(0, 2, output_layer=OUTPUT),
    },
    "DeepSpeed": {"mp_world_size": 4, "module": piece(0, 4, lm_head=OUTPUT)},
    "fairseq": fairseq(piece(0, 4, **{"decoder.fc_out": OUTPUT}), model_parallel_size=4),
}


@pytest.mark.parametrize("form", OF_SETTINGS)
def test_a_part_by_its_settings_is_refused(form, tmp_path):
    refused(saved(tmp_path / "model.pt", OF_SETTINGS[form]), "one of 4 parts, by its settings")


def test_a_part_by_its_size_is_refused(tmp_path):
    part = {"args": argparse.Namespace(padded_vocab_size=200), "model": piece(0, 4, lm_head=OUTPUT)}
    refused(saved(tmp_path / "model.pt", part), "a table of 200 words.*50 x 6")


def test_numbered_files_of_which_each_holds_a_piece(tmp_path):
    for rank in range(2):
        torch.save(piece(rank, lm_head=OUTPUT), tmp_path / f"model-{rank + 1:05}-of-00002.pt")
        np.save(tmp_path / f"table-{rank:05}-of-00002.npy", OUTPUT.chunk(2)[rank].numpy())
    refused(tmp_path / "model-00002-of-00002.pt", "lm_head.weight: each of 2 files has a piece")
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


def test_the_kinds_of_segments_are_no_vocabulary(tmp_path):
    """A part of the table of a model like BERT was measured in silence."""
    torch.save({"bert.word_embeddings.weight": OUTPUT[:50].clone()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"vocab_size": 200, "type_vocab_size": 2}')
    refused(tmp_path, "a table of 200 words.*50 x 6")


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


def test_an_index_of_names_with_slashes(tmp_path):
    tensors = {"decoder/embed_tokens": INPUT, "decoder/lm_head": OUTPUT}
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


@pytest.mark.parametrize("name", ["model_{}.pt", "language{}.pt", "checkpoint{}.pt"])
def test_files_whose_names_differ_in_a_number_are_wholes(name, tmp_path):
    """A frozen body with a new table for each language was taken for parallel processes."""
    paths = [tmp_path / name.format(number) for number in range(2)]
    for path, table in zip(paths, (INPUT, OUTPUT)):
        torch.save({"lm_head.weight": table, "norm.weight": NORM}, path)
    assert is_table(measured(paths[0]), INPUT) and is_table(measured(paths[1]), OUTPUT)
