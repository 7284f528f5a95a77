"""How many experts of a trained mixture of softmaxes have a negligible posterior.

    python -m studies.mixture_posteriors CHECKPOINT DATA [--subset valid] [--tokens 20000]

An expert whose posterior given the target, r_k, is negligible adds nothing to the gradients of the
contexts and of the table: two of the three products of a training step could leave its row out.
For each threshold: the share of the experts' rows below it, and the share of those products that
would be saved at most, were leaving rows out free.
"""

from __future__ import annotations

import argparse
from typing import Any, List

import torch
from fairseq import checkpoint_utils
from torch import Tensor

import spectral_fairseq.plugin  # noqa: F401  (registers with fairseq)
from benchmarks.harness import positive, print_result, print_table
from spectral_fairseq.functional.mixture_loss import posterior
from spectral_fairseq.heads.mixture import MixtureOfSoftmaxes

THRESHOLDS = (1e-8, 1e-6, 1e-4, 1e-2)


@torch.no_grad()
def posteriors(model: Any, task: Any, subset: str, tokens: int) -> Tensor:
    """r, shape (T, K) with T near ``tokens``, on the first batches of a subset."""
    (head,) = (module for module in model.modules() if isinstance(module, MixtureOfSoftmaxes))
    seen: List[Tensor] = []
    head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    padding = task.target_dictionary.pad()
    batches = task.get_batch_iterator(
        task.dataset(subset), max_sentences=10, num_workers=0, disable_iterator_cache=True
    ).next_epoch_itr(shuffle=False)
    found: List[Tensor] = []
    for sample in batches:
        model(**sample["net_input"])
        kept = sample["target"].ne(padding)  # [B, T]
        features, words = seen.pop()[kept], sample["target"][kept]
        scores = torch.matmul(head.contexts(features), head.table.weight.t())  # [n, K, N]
        if head.bias is not None:
            scores += head.bias
        index = words.view(-1, 1, 1).expand(-1, scores.size(1), 1)
        hit = scores.gather(2, index).squeeze(2) - scores.logsumexp(2)  # [n, K]
        found.append(posterior(head.log_prior(features), hit))
        if sum(map(len, found)) >= tokens:
            break
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("data")
    parser.add_argument("--subset", default="valid")
    parser.add_argument("--tokens", type=positive, default=20_000)
    args = parser.parse_args()
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [args.checkpoint], arg_overrides={"data": args.data}
    )
    task.load_dataset(args.subset)
    shares = posteriors(models[0].float().eval(), task, args.subset, args.tokens)
    rows = [
        {
            "posterior below": threshold,
            "share of rows": f"{(shares < threshold).float().mean():.4f}",
            "saved at most": f"{(shares < threshold).float().mean() * 2 / 3:.4f}",
        }
        for threshold in THRESHOLDS
    ]
    print_table(rows)
    entropy = -torch.special.xlogy(shares, shares).sum(1)
    largest = shares.amax(1)
    print(
        f"{len(shares):,} tokens, K = {shares.size(1)}; exp of the mean entropy "
        f"{entropy.mean().exp():.2f} experts; the largest posterior is {largest.mean():.3f} in "
        f"the mean"
    )
    print_result(
        "mixture_posteriors",
        tokens=len(shares),
        components=shares.size(1),
        below={
            f"{threshold:g}": float((shares < threshold).float().mean()) for threshold in THRESHOLDS
        },
    )


if __name__ == "__main__":
    main()
