"""Mean and standard deviation over the seeds of a method."""

import pytest

from spectral_fairseq.analysis.comparison import by_method
from spectral_fairseq.errors import ConfigurationError


def checkpoint(label, **measures):
    return {"label": label, "measures": measures}


def test_seeds_of_a_method():
    checkpoints = [
        checkpoint("p1", i1=0.5, rank=3.0),
        checkpoint("sc", i1=0.9, rank=7.0),
        checkpoint("p2", i1=0.7, rank=None),
    ]
    plain, controlled = by_method(checkpoints, ["plain", "controlled", "plain"])
    assert plain["name"] == "plain" and plain["labels"] == ["p1", "p2"]
    assert plain["measures"] == {
        "i1": {"mean": pytest.approx(0.6), "std": pytest.approx(0.02**0.5)}
    }
    assert controlled["measures"]["rank"] == {"mean": 7.0, "std": None}
    with pytest.raises(ConfigurationError, match="3 names in --methods"):
        by_method(checkpoints, ["plain", "controlled"])
