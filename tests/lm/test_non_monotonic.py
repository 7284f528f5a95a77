import random

import pytest

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.averaged_sgd import NonMonotonicTrigger
from tests.reference import averaged_sgd as reference


@pytest.mark.parametrize("interval", [0, 1, 3, 5])
def test_equals_the_condition_written_out(interval):
    generator = random.Random(interval)
    fired = 0
    for _ in range(30):
        trigger, history = NonMonotonicTrigger(interval), []
        for _ in range(12):
            loss = generator.choice([1.0, 1.5, 2.0, 2.5])  # ties included
            expected = reference.fires(history, interval, loss)
            assert trigger.check(loss) is expected
            history.append(loss)
            fired += expected
    assert fired > 10


def test_fires_in_the_seventh_epoch_at_the_earliest():
    """n = 5: the value of the first epoch counts once five others came after it."""
    trigger = NonMonotonicTrigger()
    assert [trigger.check(1.0 + epoch) for epoch in range(7)] == [False] * 6 + [True]


def test_goes_on_from_a_history():
    trigger = NonMonotonicTrigger(1, [3.0, 4.0])
    assert trigger.reference == 3.0
    assert trigger.check(3.5)
    trigger.restart()
    assert not trigger.check(9.0)


def test_a_loss_that_is_not_a_number_is_no_optimum():
    trigger = NonMonotonicTrigger(0)
    assert not trigger.check(float("nan"))
    assert not trigger.check(2.0)
    assert trigger.check(float("nan"))


def test_a_negative_interval_is_refused():
    with pytest.raises(ConfigurationError, match="`interval`"):
        NonMonotonicTrigger(-1)
