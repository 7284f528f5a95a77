"""SGD in float64, with the average of its iterates."""


# SGD and the average of all its iterates since a step, kept as a list.
def averaged_sgd(weights, gradients, rates, weight_decay=0.0, start=None):
    """Weights and average after the steps.

    ``gradients[t]`` is a function of the weights; averaging starts after ``start`` steps (never,
    for None), so that the first iterate counted is the result of step ``start + 1``.
    """
    weights, kept = weights.double(), []
    for t, (gradient, rate) in enumerate(zip(gradients, rates)):
        weights = weights - rate * (gradient(weights) + weight_decay * weights)
        if start is not None and t >= start:
            kept.append(weights)
    return weights, sum(kept) / len(kept) if kept else weights


def averaging_fires(history, interval, loss):
    """The reference implementation's condition, on the losses before ``loss``."""
    return len(history) > interval and loss > min(history[: len(history) - interval])
