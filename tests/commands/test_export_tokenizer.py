"""AutoTokenizer on the written files gives the ids that fairseq's dictionary gives."""

import io

import pytest

from spectral_fairseq.checkpoints.dictionary import SPECIALS
from spectral_fairseq.commands.export_tokenizer import write_tokenizer
from spectral_fairseq.errors import DataError

TEXT = [
    "the lower house is slower than the newest one",
    "a new house is lower than this house",
    "she knew the newer houses",
]
LANGUAGES = ("en", "de")


@pytest.fixture
def tokenizer_in(transformers):
    return lambda folder, **more: transformers.AutoTokenizer.from_pretrained(str(folder), **more)


def ids(pieces, symbols):
    return [symbols.index(one) if one in symbols else 3 for one in pieces]


def dictionaries(pieces):
    """Source and target symbols: other orders, and some of the source's are missing."""
    known = sorted({one for line in pieces for one in line})
    return [*SPECIALS, *known[:-2]], [*SPECIALS, *reversed(known)]


@pytest.mark.slow
def test_codes_of_subword_nmt(tokenizer_in, tmp_path):
    learn_bpe = pytest.importorskip("subword_nmt.learn_bpe").learn_bpe
    apply_bpe = pytest.importorskip("subword_nmt.apply_bpe")
    pytest.importorskip("sacremoses")
    codes = tmp_path / "codes"
    with codes.open("w", encoding="utf-8") as out:
        learn_bpe(io.StringIO("\n".join(TEXT)), out, 25)
    bpe = apply_bpe.BPE(io.StringIO(codes.read_text("utf-8")))
    pieces = [bpe.process_line(line).split() for line in TEXT]
    source, target = dictionaries(pieces)
    write_tokenizer(tmp_path, source, target, LANGUAGES, bpe_codes=codes)
    tokenizer = tokenizer_in(tmp_path)
    assert any(one.endswith("@@") for line in pieces for one in line)
    for line, cut in zip(TEXT, pieces):
        assert tokenizer(line)["input_ids"] == [*ids(cut, source), 2]
        assert tokenizer.decode([*ids(cut, target), 2], skip_special_tokens=True) == line

    codes.write_text("#version: 0.2\na b c\n")
    with pytest.raises(DataError, match="a b c"):
        write_tokenizer(tmp_path, source, target, LANGUAGES, bpe_codes=codes)


@pytest.mark.parametrize("joined", [True, False])
def test_a_sentencepiece_model(joined, tokenizer_in, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=24, minloglevel=2
    )
    file = tmp_path / "spm.model"
    file.write_bytes(model.getvalue())
    cut = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [cut.encode(line, out_type=str) for line in TEXT]
    source, target = dictionaries(pieces)
    if joined:
        source = target
    folder = tmp_path / "hf"
    folder.mkdir()
    write_tokenizer(folder, source, target, LANGUAGES, sentencepiece_model=file)
    tokenizer = tokenizer_in(folder)
    for line, parts in zip(TEXT, pieces):
        assert tokenizer(line)["input_ids"] == [*ids(parts, source), 2]
        assert tokenizer.decode([*ids(parts, target), 2], skip_special_tokens=True) == line


def test_words_between_spaces(tokenizer_in, tmp_path):
    lines = [line.split() for line in TEXT]
    source, target = dictionaries(lines)
    said = write_tokenizer(tmp_path, source, target, LANGUAGES)
    assert 'subfolder="target"' in said
    coder, decoder = tokenizer_in(tmp_path), tokenizer_in(tmp_path, subfolder="target")
    for line in lines:
        assert coder(" ".join(line))["input_ids"] == [*ids(line, source), 2]
        found = decoder.decode([*ids(line, target), 2], skip_special_tokens=True)
        assert found == " ".join(line)

    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\n")
    folder = tmp_path / "lm"
    folder.mkdir()
    said = write_tokenizer(folder, source, source, None, bpe_codes=codes)
    assert "cut it into subwords first" in said
    assert (folder / "bpe.codes").read_text() == codes.read_text()
    assert tokenizer_in(folder)(TEXT[0])["input_ids"] == [2, *ids(lines[0], source)]
