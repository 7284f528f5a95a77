"""``export --to``: folders for transformers and CTranslate2 that compute what fairseq computes."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.reading import load_checkpoint, torch_load
from spectral_fairseq.commands import export as subcommand
from spectral_fairseq.commands import export_huggingface as writer
from spectral_fairseq.commands.export_plain import plain_checkpoint
from spectral_fairseq.commands.logit_check import LogitCheck, build_model, task_like
from spectral_fairseq.provenance import import_transformers
from tests.checkpoints.made import save_dictionary
from tests.commands.test_export import hypotheses, last
from tests.conftest import PACKAGE


@pytest.fixture
def export(command):
    """Export into the format of a folder; returns the folder, or on a failure the error."""

    def run(checkpoint, out, *more, to="huggingface", rc=0):
        said = command("export", "--to", to, checkpoint, out, *more, rc=rc)
        return said if rc else out

    return run


LIMIT = 10  # tokens of a translation


def by_ctranslate2(folder, lines, beam):
    ctranslate2 = pytest.importorskip("ctranslate2")
    translator = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1)
    results = translator.translate_batch(
        [line.split() for line in lines], beam_size=beam, max_decoding_length=LIMIT
    )
    return [" ".join(result.hypotheses[0]) for result in results]


def by_transformers(folder, lines, _beam):
    """With the beam of the folder's settings, which is fairseq's default of 5."""
    transformers = import_transformers()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(lines, return_tensors="pt", padding=True, return_token_type_ids=False)
    found = model.generate(**batch, max_new_tokens=LIMIT + 1)
    return tokenizer.batch_decode(found, skip_special_tokens=True)


@pytest.mark.parametrize("to, translate, beam", [
    ("ctranslate2", by_ctranslate2, 1),
    ("ctranslate2", by_ctranslate2, 4),
    ("huggingface", by_transformers, 5),
])  # fmt: skip
def test_another_program_translates_the_same(
    to, translate, beam, request, train, export, tiny_translation_data, run_cli, tmp_path
):
    if to == "huggingface":
        request.getfixturevalue("transformers")
    else:
        pytest.importorskip(to)
    # Trained long enough that no two translations are about equally likely. With renewed factors
    # the limit cuts one of them off, which other programs score differently.
    path = (
        train(
            *"transformer_sc spectrum_control --share-all-embeddings --svd-interval 0".split(),
            *"--max-tokens 2000 --max-epoch 300 --max-update 300 --lr 0.01".split(),
            *"--disable-validation --no-epoch-checkpoints --save-interval 300".split(),
        )
        / "checkpoint_last.pt"
    )
    lines = (tiny_translation_data / "test.de").read_text("utf-8").splitlines()
    found = translate(export(path, tmp_path / "out", to=to), lines, beam)
    ours = run_cli(
        *("fairseq-generate", tiny_translation_data, "--path", path),
        *("--user-dir", PACKAGE, "--beam", beam, "--max-len-b", LIMIT),
        *("--required-batch-size-multiple", "1"),
        cwd=tmp_path,
    )
    # A hypothesis that is cut off by the limit is scored differently by each program.
    ended = {
        number: text
        for number, (text, _) in hypotheses(ours.stdout).items()
        if max(len(text.split()), len(found[number].split())) < LIMIT - 1
    }
    assert {number: found[number] for number in ended} == ended
    assert len(set(ended.values())) > 2


@pytest.mark.parametrize("to", ["huggingface", "ctranslate2"])
def test_a_model_of_several_language_pairs_is_refused(to, train, export, tmp_path):
    """It asked for a dictionary that no folder has, because the task appends its languages."""
    pytest.importorskip("transformers" if to == "huggingface" else to)
    checkpoint = load_checkpoint(last(train, "three ways"))
    task = {**checkpoint["cfg"]["task"], "lang_pairs": "de-en,en-de"}
    path = tmp_path / "multilingual.pt"
    torch.save({**checkpoint, "cfg": {**checkpoint["cfg"], "task": task}}, path)
    error = export(path, tmp_path / "out", to=to, rc=2)
    assert f"one language pair, for --to {to}" in error
    assert not (tmp_path / "out").exists()


def test_a_language_model(transformers, train, export, tmp_path):
    checkpoint = last(train, "language model")
    out = export(checkpoint, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "w1 w2 w3 unheard w5"
    batch = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    plain = plain_checkpoint(load_checkpoint(checkpoint))
    fairseq_model = build_model(plain, task_like(plain["model"]))
    symbols = dictionary_of(plain)
    words = [symbols.index(word) + 4 if word in symbols else 3 for word in text.split()]
    assert batch["input_ids"].tolist() == [[2, *words]]
    with torch.no_grad():
        expected = fairseq_model(batch["input_ids"])[0]
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)


def dictionary_of(checkpoint):
    lines = Path(checkpoint["cfg"]["task"]["data"], "dict.txt").read_text("utf-8").splitlines()
    return [line.split()[0] for line in lines]


def test_ctranslate2_scores_a_language_model(train, export, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    checkpoint = last(train, "language model")
    out = export(checkpoint, tmp_path / "ct2", to="ctranslate2")
    generator = ctranslate2.Generator(str(out), device="cpu")
    plain = plain_checkpoint(load_checkpoint(checkpoint))
    words = dictionary_of(plain)[:6]
    ids = torch.tensor([[2, *range(4, 4 + len(words))]])
    with torch.no_grad():
        logits = build_model(plain, task_like(plain["model"]))(ids)[0]
    expected = torch.log_softmax(logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    (scores,) = generator.score_batch([["</s>", *words]])
    assert scores.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_plain_checkpoints_of_fairseq_and_a_folder_of_dictionaries(
    transformers, train, export, tiny_translation_data, tmp_path
):
    checkpoint = train("transformer", "cross_entropy") / "checkpoint_last.pt"
    state = torch_load(checkpoint, map_location="cpu")
    task = state["cfg"]["task"]
    (task if isinstance(task, dict) else vars(task))["data"] = "/moved/away"
    moved = tmp_path / "moved.pt"
    torch.save(state, moved)
    out = tmp_path / "hf"
    assert "--data" in export(moved, out, rc=2) and not out.exists()
    export(moved, out, "--data", tiny_translation_data)
    assert json.loads((out / "config.json").read_text())["model_type"] == "fsmt"


def test_symbols_that_a_task_appends_belong_to_the_dictionaries_of_a_folder(tmp_path):
    """As to those of the folder that the checkpoint names, which is found in the other case."""
    save_dictionary(tmp_path / "dict.txt", 57)
    task = {"_name": "denoising", "data": str(tmp_path)}
    model = {"decoder.embed_tokens.weight": torch.rand(62, 4)}
    for data in (None, str(tmp_path)):
        arguments = argparse.Namespace(data=data, checkpoint="")
        target, *_ = subcommand._dictionaries(arguments, {"cfg": {"task": task}, "model": model})
        assert len(target.symbols) == 62 and target.symbols[-1] == "<mask>"


@pytest.mark.parametrize(
    "file, task, languages",
    [
        ("dict.txt", {"source_lang": "de", "target_lang": "en"}, ("de", "en")),
        ("dict.txt", {}, ("source", "target")),
        ("dict.zh-Hant.txt", {"target_lang": "en"}, ("zh-Hant", "en")),
        ("words", {"fixed_dictionary": "words"}, ("source", "target")),
    ],
)
def test_languages_are_those_of_the_training(file, task, languages):
    """They were the second part of the name of the dictionary, such as txt."""
    words, sides = WordList(Path(file), [], []), ("source", "target")
    assert tuple(subcommand._language(task, words, side) for side in sides) == languages


def test_nothing_is_left_of_a_model_with_other_logits(
    transformers, train, export, tmp_path, monkeypatch
):
    monkeypatch.setattr(writer, "_compare", lambda *_: LogitCheck(1.0, 1.0))
    export(last(train, "three ways"), tmp_path / "hf", rc=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["huggingface", "ctranslate2"])
def test_a_full_disk_is_named_and_leaves_what_was_there(
    to, transformers, train, export, tmp_path, monkeypatch
):
    """A limit on the size of files stands for it; safetensors has an error of its own for it."""
    resource = pytest.importorskip("resource")
    if to == "ctranslate2":
        pytest.importorskip("ctranslate2")
    checkpoint = last(train, "three ways")
    out = export(checkpoint, tmp_path / "out", to=to)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    save, limits = torch.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_with_space(*arguments, **options):  # in the temporary folder
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        save(*arguments, **options)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))

    monkeypatch.setattr(torch, "save", save_with_space)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        said = export(checkpoint, out, "--overwrite", to=to, rc=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "out to be written" in said and "too large" in said and "another folder" in said
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_folders_of_the_format_are_replaced(transformers, train, export, tmp_path):
    checkpoint, out = last(train, "three ways"), tmp_path / "hf"
    out.mkdir()
    (out / "precious.txt").touch()
    assert "--overwrite" in export(checkpoint, out, rc=2)
    for named in ("config.json", "precious.txt"):
        assert named in export(checkpoint, out, "--overwrite", rc=2)
        assert (out / "precious.txt").exists()
        (out / "config.json").touch()
    (out / "precious.txt").unlink()
    for _ in range(2):
        export(checkpoint, out, "--overwrite")
        assert (out / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    copy = out / "mine.pt"
    copy.write_bytes(checkpoint.read_bytes())
    assert "no input" in export(copy, out, "--overwrite", rc=2) and copy.exists()


@pytest.mark.parametrize("to, flags, said", [
    ("fairseq", ("--data", "."), "--data"),
    ("huggingface", ("--quantization", "int8"), "--to ctranslate2"),
    ("huggingface", ("--bpe-codes", "a", "--sentencepiece-model", "b"), "both"),
    ("huggingface", ("--bpe-codes", "/none"), "no such file"),
    ("ctranslate2", ("--quantization", "int3"), "int8"),
])  # fmt: skip
def test_flags_of_another_format(to, flags, said, train, export, tmp_path):
    assert said in export(last(train, "three ways"), tmp_path / "out", *flags, to=to, rc=2)
    assert list(tmp_path.iterdir()) == []


def test_without_transformers(train, export, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = export(last(train, "three ways"), tmp_path / "hf", rc=2)
    assert '".[export]"' in error and list(tmp_path.iterdir()) == []
