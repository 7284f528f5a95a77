"""What the config.json of a model of transformers says of its words and its output layer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Iterator, List, Mapping, Optional

# Classes of transformers that end in an output layer over words, first those that are decoders, and
# what comes before that in the names of those whose own default is to share it with the input's
# table.
_WRITES_WORDS = re.compile(
    "(?P<decoder>(?<!With)LMHeadModel|ForCausalLM)|"
    "(With)?LMHead|ForMaskedLM|ForConditionalGeneration|Seq2SeqLM|MTModel"
)
_TIED = frozenset(
    "Albert Bart Bert BigBird BigBirdPegasus BioGpt Blenderbot BlenderbotSmall Bloom CTRL "
    "Camembert Cohere Cohere2 ConvBert Data2VecText Deberta DebertaV2 DistilBert Electra "
    "Ernie Esm FNet Falcon FalconMamba Flaubert Funnel GPT2 GPTBigCode GPTNeo Gemma Gemma2 Gemma3 "
    "Gemma3n IBert JetMoe LED LayoutLM Lfm2 LongT5 Longformer Luke M2M100 MBart MPNet MT5 "
    "Mamba Marian MegatronBert MobileBert ModernBert ModernBertDecoder Mpt Mra Mvp NllbMoe "
    "Nystromformer OPT OpenAIGPT PLBart Pegasus PegasusX ProphetNet RecurrentGemma RoCBert "
    "RoFormer Roberta RobertaPreLayerNorm SmolLM3 SqueezeBert Starcoder2 SwitchTransformers "
    "T5 T5Gemma Tapas UMT5 XGLM XLM XLMRoberta XLMRobertaXL XLNet Xmod Yoso Zamba Zamba2".split()
)
# A size such as type_vocab_size counts the kinds of segments.
_VOCABULARY = re.compile("(?<!type_)vocab_size$")


@dataclass(frozen=True)
class ModelConfig:
    """What the settings of a model say of its words and its output layer.

    Attributes:
        sizes: the numbers of words, of each vocabulary one.
        shares: whether the output layer shares the input's table; None if they do not say.
        by_default: whether it shares it by the default of the model's class.
        padding: the row of the padding symbol, unless the symbol has another meaning as well.
        dim: the length of a word's vector, where the params.json of Llama says it.
    """

    sizes: List[int] = field(default_factory=list)
    shares: Optional[bool] = None
    by_default: bool = False
    padding: List[int] = field(default_factory=list)
    dim: Optional[int] = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelConfig:
        """Read what a config.json or a params.json holds."""
        with_text = _text_settings(settings)
        ties, dim = with_text.get("tie_word_embeddings"), settings.get("dim")
        return cls(
            sizes=sorted(set(_sizes(settings))),
            shares=ties if isinstance(ties, bool) else None,
            by_default=_shares_by_default(settings),
            padding=_padding_rows(with_text),
            dim=dim if "norm_eps" in settings and type(dim) is int else None,
        )


def writes_words(name: str) -> bool:
    """Whether a model ends in an output layer over words, by the name of its class."""
    return _WRITES_WORDS.search(name) is not None


def is_decoder(name: str) -> bool:
    """Whether a model is a decoder, perhaps with an encoder of images, by the name of its class."""
    found = _WRITES_WORDS.search(name)
    return found is not None and found["decoder"] is not None


def _sizes(settings: Mapping[str, Any], depth: int = 3) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and depth:
            yield from _sizes(value, depth - 1)
        elif _VOCABULARY.search(str(name)) and type(value) is int and value > 0:
            yield value


def _text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the part of a model that has the words, with those of the whole before it."""
    parts = (settings.get(name) for name in ("text_config", "decoder"))
    inner = next((part for part in parts if isinstance(part, Mapping)), {})
    return {**inner, **{name: value for name, value in settings.items() if value is not None}}


def _shares_by_default(settings: Mapping[str, Any]) -> bool:
    # config.json may leave ``tie_word_embeddings`` out where it has its class's own default.
    classes = settings.get("architectures")
    names = map(str, classes) if isinstance(classes, list) else ()
    found = filter(None, map(_WRITES_WORDS.search, names))
    return any(match.string[: match.start()] in _TIED for match in found)


def _padding_rows(settings: Mapping[str, Any]) -> List[int]:
    row = settings.get("pad_token_id")
    others: List[Any] = []
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        other = settings.get(name)
        others += other if isinstance(other, list) else [other]
    return [row] if type(row) is int and row >= 0 and row not in others else []
