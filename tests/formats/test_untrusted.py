"""Files that lie: one clear error each, nothing is executed, and no memory is taken on trust."""

import io
import json
import struct
import tracemalloc
import zipfile

import pytest
import torch

from spectral_fairseq.analysis import analyze
from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import CheckpointError, DataError
from spectral_fairseq.formats.opening import open_model
from tests.checkpoints.made import Payload
from tests.formats.test_opening import TABLE, binary_lines, sharded, text_lines


def safetensors_bytes(header, declared=None, data=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if declared is None else declared) + text + data


def entry(shape, start, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def npy_bytes(shape="(3, 2)", descr="'<f4'", data=b"\0" * 24):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz_bytes(member, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("Wemb.npy", member)
    return buffer.getvalue()


WHOLE = safetensors_bytes({"wte": entry([4, 4], 0, 64)})
HUGE = 1 << 60
LYING = {
    "safetensors: a truncated header": WHOLE[:20],
    "safetensors: truncated numbers": WHOLE[:-1],
    "safetensors: a header of 2^60 bytes": safetensors_bytes({}, HUGE),
    "safetensors: 2^60 numbers": safetensors_bytes({"wte": entry([HUGE], 0, 4 * HUGE)}),
    "safetensors: a product that overflows": safetensors_bytes({"w": entry([HUGE, 16], 0, 64)}),
    "safetensors: overlapping tensors": safetensors_bytes(
        {"a": entry([2, 4], 0, 32), "b": entry([2, 4], 16, 48)}, data=b"\0" * 48
    ),
    "safetensors: a gap": safetensors_bytes({"a": entry([2, 4], 32, 64)}),
    "safetensors: not JSON": safetensors_bytes(b"{" * 64),
    "npy: more numbers than bytes": npy_bytes("(1152921504606846976, 2)"),
    "npy: a negative shape": npy_bytes("(-3, -2)"),
    "npy: code as a shape": npy_bytes("__import__('os').system('touch executed')"),
    "npy: objects": npy_bytes(descr="'|O'"),
    "npy: a truncated header": npy_bytes()[:30],
    "npz: more numbers than bytes": npz_bytes(npy_bytes("(1152921504606846976, 2)")),
    "npz: compressed, more numbers than bytes": npz_bytes(
        npy_bytes("(1000000, 1000000)"), zipfile.ZIP_DEFLATED
    ),
    "npz: a trap of zeros": npz_bytes(
        npy_bytes("(4000, 1000)", data=b"\0" * 16_000_000), zipfile.ZIP_DEFLATED
    ),
    "npz: no array": npz_bytes(b"hello"),
    "word2vec: more words than bytes": b"1152921504606846976 300\n" + b"".join(text_lines()),
    "word2vec: more dimensions than bytes": b"30 1152921504606846976\n" + b"".join(text_lines()),
    "word2vec: no words": b"0 4\n",
    "word2vec: one word too many": b"29 4\n" + b"".join(text_lines()),
    "word2vec: one word too few": b"31 4\n" + b"".join(text_lines()),
    "word2vec: a line without numbers": b"30 4\n" + b"".join(text_lines()[:-1]) + b"word" * 20,
    "binary word2vec: truncated": b"30 4\n" + b"".join(binary_lines())[:-3],
    "binary word2vec: more words than bytes": b"3000000 4\n" + b"".join(binary_lines()),
    "GloVe: lines of different lengths": b"".join(text_lines()) + b"w 1 2\n",
    "empty": b"",
    "text": b"hello, world\n",
    "random bytes": bytes(range(255, 0, -1)),
    "compressed": b"\x1f\x8b\x08\x00" + bytes(99),
    "a web page": b"<!DOCTYPE html><html>404</html>",
}


@pytest.mark.parametrize("what", LYING)
def test_files_that_lie(what, tmp_path, monkeypatch):
    if what.startswith("safetensors"):
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model"
    path.write_bytes(LYING[what])
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointError, DataError)) as caught:
            open_model(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and "weights_only" not in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_the_intact_files_are_read(tmp_path):
    """Those above are wrong in one thing only."""
    files = {
        "wte": WHOLE,
        "array": npy_bytes(),
        "Wemb": npz_bytes(npy_bytes()),
        "vectors": b"30 4\n" + b"".join(binary_lines()),
    }
    pytest.importorskip("safetensors")
    for name, content in files.items():
        (tmp_path / "model").write_bytes(content)
        assert name in open_model(tmp_path / "model").tensors


def test_code_in_a_state_dict_is_not_run(tmp_path):
    torch.save({"wte.weight": TABLE, "x": Payload(tmp_path / "executed")}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="could run code"):
        open_model(tmp_path / "model.bin")
    assert not (tmp_path / "executed").exists()


def test_dictionaries_that_contain_themselves(tmp_path):
    inner = {"wte.weight": TABLE}
    outer = {f"part {number}": inner for number in range(50)}
    inner.update(outer, up=outer)
    outer["self"] = outer
    torch.save(outer, tmp_path / "model.bin")
    (name,) = open_model(tmp_path / "model.bin").tensors
    assert name == "part 0.wte.weight"


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "absent.safetensors", "..", ""])
def test_an_index_leads_only_to_files_beside_it(file, tmp_path):
    pytest.importorskip("safetensors")
    index = sharded(tmp_path, "safetensors")
    (tmp_path.parent / "secret").write_bytes(WHOLE)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises(CheckpointError, match="to name files beside it"):
        open_model(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', "{", "[" * 100_000])
def test_an_index_that_is_none(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises((CheckpointError, DataError), match="index"):
        open_model(tmp_path)


def test_an_index_of_other_files(tmp_path):
    pytest.importorskip("safetensors")
    index = sharded(tmp_path, "safetensors")
    known = json.loads(index.read_text())["weight_map"]
    known["embed_tokens.weight"] = known["lm_head.weight"]
    index.write_text(json.dumps({"weight_map": known}))
    with pytest.raises(CheckpointError, match="as its index says"):
        dict(open_model(tmp_path).tensors)


ATTRIBUTES = ["dim", "numel", "size", "detach", "is_floating_point", "placements", "to_local"]


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("holder", [None, "model", "fairseq"])
def test_attributes_that_a_file_sets_on_a_parameter_hide_no_method(holder, name, tmp_path):
    parameter = torch.nn.Parameter(TABLE)
    setattr(parameter, name, 5)
    state = {"lm_head.weight": parameter}
    state = {"model": state, "extra_state": {}, "args": None} if holder == "fairseq" else state
    torch.save({"model": state} if holder == "model" else state, tmp_path / "file.pt")
    (table,) = open_model(tmp_path / "file.pt").tensors.values()
    assert torch.equal(table, TABLE) and table.shape == TABLE.shape
    assert analyze(tmp_path / "file.pt").scalars()["mean_cosine"] is not None


def of_no_numbers(form, rows, path):
    if form == "safetensors":
        path.write_bytes(safetensors_bytes({"wte": entry([rows, 0], 0, 0)}, data=b""))
    elif form == "torch":
        torch.save({"wte.weight": torch.zeros(rows, 0)}, path)
    elif form == "factors":
        stored = dict.fromkeys(SVDEmbedding.entries, torch.zeros(0, 0))
        stored[SVDEmbedding.entries[0]] = torch.zeros(rows, 0)
        torch.save({f"wte.{name}": value for name, value in stored.items()}, path)
    else:
        array = npy_bytes(f"({rows}, 0)", data=b"")
        path.write_bytes(array if form == "npy" else npz_bytes(array))


@pytest.mark.parametrize("rows", [1 << 28, 1 << 40])
@pytest.mark.parametrize("form", ["safetensors", "torch", "factors", "npy", "npz"])
def test_rows_without_numbers_take_no_memory(form, rows, tmp_path):
    """104 bytes took 2.3 GB, 112 ended in a traceback."""
    if form == "safetensors":
        pytest.importorskip("safetensors")
    of_no_numbers(form, rows, tmp_path / "file")
    for options in ({}, {"counts": [1.0]}):
        with pytest.raises((CheckpointError, DataError), match="vectors of numbers|fit together"):
            analyze(tmp_path / "file", **options)
