"""Where the time of an update goes: beside its products alone, and by kinds of operators.

    python -m benchmarks.bench_update [--shape iwslt|small ...] [--precision fp32|bf16] [--turns N]

An update is criterion, backward, clipping and Adam (bench_step.py), with the loss of this package
and fast dropout, and with fairseq's criterion and dropout; both multiply as ``--float32-products
auto`` does, and keep freed memory, as all commands with ``--user-dir`` do. The products are what
the update multiplies, recorded as it runs and repeated with random matrices of the same shapes,
layouts and types; all take turns in one process. The share of each kind of operator is from torch's
profiler in its second update, without what it costs itself; what is left of the update's time is
Python and the work between operators.
"""

from __future__ import annotations

import argparse
import re
import statistics
from contextlib import ExitStack
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks.bench_step import SHAPES, Step
from benchmarks.harness import median_ratio, paired_times, positive, print_result, print_table
from spectral_fairseq.functional.float32_products import float32_products
from spectral_fairseq.plugin.dropout import draw_masks_fast
from spectral_fairseq.plugin.memory import keep_freed_memory

SIZES: Dict[str, Dict[str, Any]] = {
    "iwslt": SHAPES["iwslt"],
    "small": {
        **SHAPES["iwslt"],
        "sentences": 256,
        "model": {
            **SHAPES["iwslt"]["model"],
            **{f"{side}_embed_dim": 128 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_embed_dim": 256 for side in ("encoder", "decoder")},
            **{f"{side}_layers": 4 for side in ("encoder", "decoder")},
        },
    },
    "tiny": SHAPES["tiny"],
}
OURS = {"_name": "regularized_cross_entropy", "label_smoothing": 0.1}
THEIRS = {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1}
# Kind -> operators; the first that matches counts. Whatever Adam calls is Adam's.
KINDS: Tuple[Tuple[str, str], ...] = (
    ("products", r"mm|linear_pointwise|mkldnn_linear|scaled_dot_product"),
    ("dropout", r"dropout|bernoulli|random_"),
    ("normalisation", r"layer_norm"),
    ("softmax and loss", r"softmax|logsumexp|\bexp_?\b|nll|gather|max|argmax"),
    ("embedding", r"embedding|index"),
    ("copies and conversions", r"copy|clone|contiguous|cat\b|to\b|empty|zero|fill|resize"),
    ("sums and elementwise", r"."),
)
_PRODUCT = re.compile(
    r"^(add)?(mm|bmm)_?$|^baddbmm_?$|linear_pointwise|dot_product_flash_attention"
)


class RecordedProducts(TorchDispatchMode):
    """Takes note of every product that is computed while it is active.

    Attributes:
        calls: operator, and its arguments with a shape, layout and type for each tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: List[Tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        """Call the operator, and keep what it was called with."""
        found = func(*args, **(kwargs or {}))
        if _PRODUCT.search(func.overloadpacket.__name__):
            self.calls.append((func, *tree_map(_described, (args, kwargs or {}))))
        return found

    def again(self) -> Callable[[], None]:
        """A function that computes the same products once more, with random matrices."""
        made: Dict[_Described, torch.Tensor] = {}

        def tensor(described: Any) -> Any:
            if not isinstance(described, _Described):
                return described
            if described not in made:
                empty = torch.empty_strided(described.size, described.stride, dtype=described.dtype)
                made[described] = empty.normal_() if empty.is_floating_point() else empty.zero_()
            return made[described]

        calls = [(func, *tree_map(tensor, (args, kwargs))) for func, args, kwargs in self.calls]

        @torch.no_grad()
        def run() -> None:
            for func, args, kwargs in calls:
                func(*args, **kwargs)

        return run


class _Described:
    """Size, strides and type of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype

    def __eq__(self, other: Any) -> bool:
        return vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.size, self.stride, self.dtype))


def _described(value: Any) -> Any:
    return _Described(value) if isinstance(value, torch.Tensor) else value


def step_of(shape: Dict[str, Any], criterion: Dict[str, Any], precision: str) -> Step:
    """An update of plain fairseq's model with a criterion."""
    arch = shape["archs"][0]
    shape = {**shape, "archs": (arch, arch), "criterions": (criterion, criterion)}
    return Step(shape, "plain", "cpu", precision)


def shares(run: Callable[[], None]) -> Dict[str, float]:
    """The share of each kind of operator in the time of all operators of an update."""
    second = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=second) as profiled:
        for _ in range(2):
            run()
            profiled.step()
    seconds = dict.fromkeys(["Adam", *(kind for kind, _ in KINDS)], 0.0)
    for event in profiled.events():
        seconds[_kind(event)] += event.self_cpu_time_total
    total = sum(seconds.values())
    return {kind: spent / total for kind, spent in seconds.items()}


def _kind(event: Any) -> str:
    name, parent = event.name, event
    while parent is not None:
        if parent.name.startswith("Optimizer.step"):
            return "Adam"
        parent = parent.cpu_parent
    return next(kind for kind, pattern in KINDS if re.search(pattern, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SIZES), default=["iwslt", "small"])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--turns", type=positive, default=5)
    args = parser.parse_args()
    keep_freed_memory()
    results = {}
    for name in args.shape:
        with ExitStack() as stack:
            half = args.precision == "bf16"
            print(stack.enter_context(float32_products(half_precision=half)), flush=True)
            ours = step_of(SIZES[name], OURS, args.precision)
            draw_masks_fast(ours.model)
            alternatives: Dict[str, Callable[[], None]] = {
                "fairseq": step_of(SIZES[name], THEIRS, args.precision),
                "this package": ours,
            }
            for of, step in list(alternatives.items()):
                with RecordedProducts() as products:
                    step()
                alternatives[f"products of {of}"] = products.again()
            times = paired_times(alternatives, args.turns)
            rows = [
                {
                    "update": of,
                    "seconds": statistics.median(times[of]),
                    "over its products": median_ratio(times[of], times[f"products of {of}"]),
                    "over fairseq": median_ratio(times[of], times["fairseq"]),
                    **shares(alternatives[of]),
                }
                for of in ("fairseq", "this package")
            ]
        print(f"{name}: {SIZES[name]['sentences']} sentences of {SIZES[name]['length']} words")
        keys = list(rows[0])
        print_table([{"": key, **{row["update"]: row[key] for row in rows}} for key in keys[1:]])
        results[name] = rows
    print_result("update", precision=args.precision, turns=args.turns, results=results)


if __name__ == "__main__":
    main()
