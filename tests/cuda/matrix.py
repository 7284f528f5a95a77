"""What the tests on devices combine: models, criterions, precisions, and a training step of each.

The virtual device (test_virtual_cuda.py) takes a covering part of the product, a real one
(test_on_gpu.py, ``python -m benchmarks.gpu parity``) all of it.
"""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import torch
from fairseq import utils
from torch import nn

from spectral_fairseq.heads import HEADS
from spectral_fairseq.lm.carry import Carry
from tests.plugin.conftest import (
    KINDS,
    LSTM,
    XL,
    build_criterion,
    build_host_model,
    build_model,
    make_sample,
    segments,
    words,
)

WORDS = words()
TASK = SimpleNamespace(source_dictionary=WORDS, target_dictionary=WORDS)

PRECISIONS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "amp": torch.float32,
}

# Smooth: a ReLU whose input is nearly zero turns with rounding, and a gradient is 4 % off.
_SMOOTH = {"activation_fn": "gelu"}
_SMALL: Dict[str, Dict[str, Any]] = {
    "transformer_sc": _SMOOTH,
    "transformer_lm_sc": {"share_decoder_input_output_embed": True, **_SMOOTH},
    "awd_lstm_ptb": LSTM,
    "transformer_xl_wt103_small": XL,
}
_MIXTURE = {"mixture_components": 3, "mixture_context_scale": 4.0}
_LSTM = {
    "share_all_embeddings": True,
    **{f"{name}_size": 16 for name in ("encoder_hidden", "decoder_hidden")},
    "decoder_out_embed_dim": 16,
}


class Model(NamedTuple):
    """A model of the matrix; ``own_loss``: its head computes its loss."""

    arch: str
    table: str
    own_loss: bool
    options: Dict[str, Any]

    @property
    def data(self) -> str:
        """``translation``, ``text`` or ``stream``."""
        if self.arch.startswith(("awd_lstm", "transformer_xl")):
            return "stream"
        return "text" if "_lm" in self.arch else "translation"

    def make(self) -> nn.Module:
        """Build it."""
        build = build_host_model if self.arch == "lstm_mos" else build_model
        return build(TASK, self.arch, embedding_type=self.table, **self.options)


def _models() -> Iterator[Tuple[str, Model]]:
    for arch, sizes in _SMALL.items():
        for table in KINDS:
            for head in HEADS:
                mixture = _MIXTURE if head.kind in ("mos", "moc") else {}
                options = {**sizes, **mixture, "output_head": head.kind}
                yield f"{arch} {table} {head.kind}", Model(arch, table, head.own_loss, options)
    options = {**XL, "adaptive_softmax_cutoff": "10,20,40"}
    for table in ("plain", "svd"):
        model = Model("transformer_xl_wt103_small", table, True, options)
        yield f"transformer_xl {table} adaptive", model
    yield "lstm_mos", Model("lstm_mos", "svd", True, {"mixture_components": 3, **_LSTM})


MODELS: Dict[str, Model] = dict(_models())

PLAIN = {"cosreg_weight": 0.0}
CRITERIONS: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "fairseq's": ("label_smoothed_cross_entropy", {"label_smoothing": 0.1}),
    "likelihood": ("mle_cosreg", {**PLAIN, "label_smoothing": 0.1}),
    "blockwise": ("mle_cosreg", {**PLAIN, "loss_form": "blockwise"}),
    "blockwise smoothed": (
        "mle_cosreg",
        {**PLAIN, "loss_form": "blockwise", "label_smoothing": 0.1},
    ),
    "cosine": ("mle_cosreg", {}),
    "spectrum control": ("spectrum_control", {}),
    "spectral norms": ("spectrum_control", {"orthogonality_weights": "0.1,0.1,0.1,0.1"}),
    "weight norm": ("weight_norm", {"weight_norm_target_by_count": True}),
    "singular values": (
        "mle_cosreg",
        {**PLAIN, "spectral_normalization_weight": 0.1, "d_optimal_weight": 0.01},
    ),
    "adversarial": ("mle_cosreg", {**PLAIN, "adversarial_epsilon": 0.02, "label_smoothing": 0.1}),
    "R-Drop": ("mle_cosreg", {**PLAIN, "rdrop_weight": 1.0, "label_smoothing": 0.1}),
    "spectrum log": ("mle_cosreg", {**PLAIN, "log_spectrum_interval": 1}),
}


def suits(name: str, criterion: str) -> bool:
    """Whether a criterion takes a model; the others refuse it before training starts."""
    model = MODELS[name]
    if criterion == "spectral norms":
        return model.table == "svd"
    if criterion == "spectrum control":
        return model.table in ("plain", "svd")
    if criterion == "R-Drop":
        return model.data != "stream"
    smoothed = "label_smoothing" in CRITERIONS[criterion][1] and criterion != "fairseq's"
    return not (smoothed and "adaptive_softmax_cutoff" in model.options)


def cases() -> Iterator[Tuple[str, str, str]]:
    """Every model, criterion and precision that go together."""
    for model, criterion, precision in itertools.product(MODELS, CRITERIONS, PRECISIONS):
        if suits(model, criterion):
            yield model, criterion, precision


def criterion_for(name: str, model: nn.Module) -> Any:
    """A new criterion of :data:`CRITERIONS`, which has taken a model."""
    preset, flags = CRITERIONS[name]
    criterion = build_criterion(TASK, preset, **flags)
    if preset != "label_smoothed_cross_entropy":
        criterion.check_model(model)
    return criterion


class Training:
    """A model, its criterion and a batch on a device; calls take one step without an optimiser.

    Args:
        model: moved to the device and the precision.
        criterion: what it is trained with.
        data: which kind of batch.
        precision: one of :data:`PRECISIONS`.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(
        self, model: nn.Module, criterion: Any, data: str, precision: str, device: str
    ) -> None:
        self.model = model.to(PRECISIONS[precision]).to(device).train()
        self.criterion, self.device = criterion, device
        self.autocast = precision == "amp"
        sizes = ((6, 4), (5, 7), (3, 2))
        sample = make_sample(TASK, sizes) if data == "translation" else segments(TASK, pad=2)
        self.sample = utils.move_to_cuda(sample) if device == "cuda" else sample
        self.stream = data == "stream"
        if self.stream:
            self.sample["net_input"]["carry"] = Carry()
        self.model.set_num_updates(0)

    def step(self, scale: float = 1.0) -> torch.Tensor:
        """Leave the gradients of ``scale`` times the loss of a token, which is returned."""
        self.model.zero_grad()
        loss, size = self._loss()
        (loss * (scale / size)).backward()
        return loss.detach() / size

    def evaluate(self) -> torch.Tensor:
        """The loss of a token in validation."""
        self.model.eval()
        if self.stream:
            self.sample["net_input"]["carry"] = Carry()
        with torch.no_grad():
            loss, size = self._loss()
        self.model.train()
        return loss / size

    def _loss(self) -> Tuple[torch.Tensor, int]:
        # Not on a CPU, where torch 1.12 knows no autocast to float16, even when it is off.
        autocast = torch.autocast(self.device, torch.float16) if self.autocast else nullcontext()
        with autocast:
            loss, size, _ = self.criterion(self.model, self.sample)
        return loss, size


def covering() -> List[Tuple[str, str, str]]:
    """Each model with one pair of criterion and precision, dealt out like cards.

    A model gets the first one of the pack that suits it.
    """
    pack = 2 * list(itertools.product(CRITERIONS, PRECISIONS))
    random.Random(0).shuffle(pack)
    dealt = []
    for model in MODELS:
        pair = next(pair for pair in pack if suits(model, pair[0]))
        pack.remove(pair)
        dealt.append((model, *pair))
    return dealt
