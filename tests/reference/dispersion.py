"""The dispersion loss and the mean cosine within sequences, pair by pair in float64."""

import math


def penalty(layers, counted, tau=1.0):
    total = weights = 0.0
    for row in range(counted.size(0)):
        places = [t for t in range(counted.size(1)) if counted[row, t]]
        weights += len(places)
        for layer in layers:
            values = []
            for i in places:
                for j in places:
                    if i != j:
                        left, right = layer[row, i].double(), layer[row, j].double()
                        lengths = float((left.norm() + 0.01) * (right.norm() + 0.01))
                        cosine = min(max(float(left @ right) / lengths, -0.75), 0.75)
                        values.append(math.exp(-math.acos(cosine) / math.pi / tau))
            if values:
                total += len(places) * math.log(sum(values) / len(values)) / len(layers)
    return total / weights


def sequence_cosine(sequences):
    means = []
    for states in sequences:
        pairs = [(i, j) for i in range(len(states)) for j in range(len(states)) if i != j]
        cosines = [
            float(states[i].double() @ states[j].double() / states[i].norm() / states[j].norm())
            for i, j in pairs
        ]
        means.append(sum(cosines) / len(pairs))
    return sum(means) / len(means)
