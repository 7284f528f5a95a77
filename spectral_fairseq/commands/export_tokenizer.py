"""The files from which ``AutoTokenizer`` gives the ids of a fairseq dictionary.

Note [Which tokenizer]
----------------------
fairseq cuts text before it sees a dictionary, so that the ids are all that belongs to the model.
A tokenizer of transformers that also cuts has to keep the ids and give ``<unk>`` for a subword
that the dictionary lacks. Two do, and both have a vocabulary for each side:

- subword-nmt codes: ``FSMTTokenizer``, which tokenizes with Moses first, as
  ``fairseq-interactive --tokenizer moses --bpe subword_nmt`` does, and also normalises
  punctuation;
- a sentencepiece model: ``MarianTokenizer``.

They end a text with </s>, as fairseq does for the source of a translation. A text for a language
model begins with </s>, which neither of them does. Language models, and models for which no
subwords are given, get a tokenizer that splits at spaces: it takes the text that
fairseq-preprocess took. Where the two dictionaries differ, that of the target, for decoding, lies
in the folder ``target``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from spectral_fairseq.checkpoints.dictionary import SPECIALS
from spectral_fairseq.errors import DataError
from spectral_fairseq.files import read_text

_NAMES = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def write_tokenizer(
    folder: Path,
    source: List[str],
    target: List[str],
    languages: Optional[Tuple[str, str]],
    bpe_codes: Optional[Path] = None,
    sentencepiece_model: Optional[Path] = None,
) -> str:
    """Write the tokenizer's files; see Note [Which tokenizer].

    Returns:
        A sentence for the user: what the tokenizer takes.
    """
    if languages and bpe_codes is not None:
        _write_fsmt(folder, source, target, languages, bpe_codes)
        return (
            "AutoTokenizer takes raw text: it tokenizes with Moses (package sacremoses), then "
            "applies the BPE codes"
        )
    if languages and sentencepiece_model is not None:
        _write_marian(folder, source, target, languages, sentencepiece_model)
        return "AutoTokenizer takes the text that sentencepiece took"
    # Under names of their own, by which a later export knows the folder.
    for file, name in ((bpe_codes, "bpe.codes"), (sentencepiece_model, "sentencepiece.model")):
        if file is not None:
            shutil.copyfile(file, folder / name)
    _write_words(folder, source, begin=languages is None)
    if source == target:
        decoding = ""
    else:
        _write_words(folder / "target", target, begin=False)
        decoding = '; decode with AutoTokenizer.from_pretrained(DIR, subfolder="target")'
    subwords = ", so cut it into subwords first" if bpe_codes or sentencepiece_model else ""
    return (
        f"AutoTokenizer splits at spaces the text that fairseq-preprocess took{subwords}{decoding}"
    )


def _write_fsmt(
    folder: Path, source: List[str], target: List[str], languages: Tuple[str, str], codes: Path
) -> None:
    for name, symbols in (("src", source), ("tgt", target)):
        ids = _ids([_with_word_end(symbol) for symbol in symbols])
        _write_json(folder / f"vocab-{name}.json", ids)
    (folder / "merges.txt").write_text("".join(f"{merge}\n" for merge in _merges(codes)), "utf-8")
    config = {"sep_token": "</s>", "langs": list(languages), "do_lower_case": False}
    _write_config(folder, "FSMTTokenizer", config)


def _write_marian(
    folder: Path, source: List[str], target: List[str], languages: Tuple[str, str], model: Path
) -> None:
    for name in ("source.spm", "target.spm"):
        shutil.copyfile(model, folder / name)
    _write_json(folder / "vocab.json", _ids(source))
    apart = source != target
    if apart:
        _write_json(folder / "target_vocab.json", _ids(target))
    config = {
        "source_lang": languages[0],
        "target_lang": languages[1],
        "separate_vocabs": apart,
    }
    _write_config(folder, "MarianTokenizer", config)


def _write_words(folder: Path, symbols: List[str], begin: bool) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel(_ids(symbols), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A" if begin else "$A </s>",
        special_tokens=[("</s>", SPECIALS.index("</s>"))],
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, "PreTrainedTokenizerFast", {})


def _write_config(folder: Path, name: str, config: Dict[str, Any]) -> None:
    common = {"tokenizer_class": name, "clean_up_tokenization_spaces": False, **_NAMES}
    _write_json(folder / "tokenizer_config.json", {**common, **config})


def _write_json(path: Path, content: Dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")


def _ids(symbols: List[str]) -> Dict[str, int]:
    return {symbol: number for number, symbol in enumerate(symbols)}


def _with_word_end(symbol: str) -> str:
    """``ab@@`` as ``ab`` and ``cd`` as ``cd</w>``, as transformers writes subwords."""
    if symbol in SPECIALS:
        return symbol
    return symbol[:-2] if symbol.endswith("@@") and len(symbol) > 2 else symbol + "</w>"


def _merges(codes: Path) -> List[str]:
    lines = read_text(codes, DataError, "Name the file of the codes.").split("\n")
    # Before version 0.2, the end of a word was a symbol of its own.
    merges = [line for line in lines[1:] if line.strip()]
    bad = next((merge for merge in merges if len(merge.split()) != 2), None)
    if not lines[0].startswith("#version: 0.2") or bad is not None:
        raise DataError(
            f"codes of subword-nmt, version 0.2, in {codes}",
            repr((lines[0] if bad is None else bad)[:60]),
            "Give the file that `subword-nmt learn-bpe` wrote.",
        )
    return merges
