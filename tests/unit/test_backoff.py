"""Pauses of loops: the delays that the documentation states, and counting failures in a row."""

import pytest

from django_mysqlqueue.options.backoff import Backoff, Failures
from pyspark_mysqlqueue.reading import RECONNECT
from tests.support.internals import RESTARTS, call, health, poller, session


def delays(backoff: Backoff, number: int, rng: float = 0.5) -> list[float]:
    return [round(backoff.delay(attempt, lambda: rng), 6) for attempt in range(1, number + 1)]


def test_failures_in_a_row_wait_longer_until_one_succeeds():
    failures = Failures(Backoff(initial=1.0, maximum=3.0, jitter=0.0))
    assert [failures.add() for _ in range(3)] == [1, 2, 3]
    assert failures.count == 3
    assert failures.clear() == 3
    assert failures.clear() == 0
    assert failures.add() == 1


@pytest.mark.parametrize(
    ("backoff", "first", "last"),
    [
        pytest.param(health.REST, [0.1, 0.2, 0.4], 5.0, id="group"),
        pytest.param(call.REST, [0.1, 0.2, 0.4], 1.0, id="handler thread"),
        pytest.param(RESTARTS, [1.0, 2.0, 4.0], 30.0, id="supervisor"),
        pytest.param(RECONNECT, [0.5, 1.0, 2.0], 3600.0, id="pipeline"),
    ],
)
def test_a_loop_waits_longer_after_each_failure(backoff, first, last):
    assert delays(backoff, 3) == first
    assert backoff.delay(5000) == last
    assert backoff.jitter == 0


def test_the_poller_waits_between_0_05_and_5_seconds():
    assert delays(poller.RETRY, 2, rng=0.0) == [0.05, 0.1]
    assert delays(poller.RETRY, 2, rng=1.0) == [0.1, 0.2]
    assert poller.RETRY.delay(5000, lambda: 1.0) == pytest.approx(5.0)


def test_transactions_that_met_retry_at_any_time_up_to_twice_the_backoff():
    assert delays(session.RETRY, 5, rng=0.0) == [0.0] * 5
    assert delays(session.RETRY, 5, rng=1.0) == [0.02, 0.04, 0.08, 0.16, 0.32]
