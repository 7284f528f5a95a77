from __future__ import annotations

from typing import Any, List

import pytest

from spectral_fairseq import compat
from spectral_fairseq.compat import Status, mend_host, tail_batch
from spectral_fairseq.compat.patching import not_needed, replace
from tests.compat.host import Host


def mend_twice() -> List[Any]:
    from fairseq import checkpoint_utils, options
    from fairseq.data import data_utils, iterators

    from spectral_fairseq import compat

    def places() -> List[int]:
        functions = [
            data_utils.batch_by_size,
            checkpoint_utils.load_checkpoint_to_cpu,
            iterators.BackgroundConsumer,
            options.parse_args_and_arch,
        ]
        return [id(function) for function in functions]

    first, before = compat.mend_host(), places()
    assert compat.mend_host() == first and places() == before
    compat._tried.clear()  # as if nothing was known of the first time
    again = compat.mend_host()
    compat._tried[:] = first
    assert places() == before
    return [mend.status.value for mend in again]


def test_mending_again_changes_nothing(mended: Host) -> None:
    assert set(mended.call(mend_twice)) == {"not needed"}


def test_everything_can_be_mended_here() -> None:
    mends = mend_host()
    assert len({mend.name for mend in mends}) == len(mends) == 10
    assert [mend for mend in mends if mend.status is Status.CANNOT] == []
    assert all(mend.defect.endswith(".") and mend.detail for mend in mends)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(compat, "_tried", [])
    return monkeypatch


def test_an_unknown_host_still_starts(untried: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AttributeError("no such function")

    untried.setattr(tail_batch, "apply", fail)
    mends = mend_host()
    assert mends[0].status is Status.CANNOT and "no such function" in mends[0].detail
    assert all(mend.status is not Status.CANNOT for mend in mends[1:])


def test_without_fairseq_nothing_can_be_mended(untried: pytest.MonkeyPatch) -> None:
    untried.setattr(compat, "why_not_importable", lambda: "no fairseq")
    untried.setattr(tail_batch, "apply", lambda: not_needed("not asked"))
    assert {(mend.status, mend.detail) for mend in mend_host()} == {(Status.CANNOT, "no fairseq")}


def test_two_hooks_on_one_function_both_stay_and_each_is_applied_once():
    class Host:
        def work(self):
            return ["host"]

    def first(original):
        return lambda self: [*original(self), "first"]

    def second(original):
        return lambda self: [*original(self), "second"]

    for _ in range(2):
        replace(Host, "work", first)
        replace(Host, "work", second)
    assert Host().work() == ["host", "first", "second"]
