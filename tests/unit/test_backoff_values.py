"""Backoff: how it grows, its limit, its jitter."""

from __future__ import annotations

import pytest

from django_mysqlqueue.options.backoff import Backoff

pytestmark = pytest.mark.any_engine


@pytest.mark.promise("Dead letters")
@pytest.mark.parametrize(
    ("attempt", "seconds"), [(1, 1), (2, 2), (3, 4), (12, 2048), (13, 3600), (1024, 3600), (1025, 3600), (10**9, 3600)]
)
def test_backoff_grows_to_its_maximum(attempt, seconds):
    assert Backoff(jitter=0).delay(attempt) == seconds


@pytest.mark.parametrize("factor", [1, 1.0, 2, 10.0, 11.0, 1000.0])
@pytest.mark.parametrize("attempt", [1, 2, 400, 2000, 2**31 - 1])
def test_backoff_is_finite_at_any_attempt(factor, attempt):
    assert 0.5 <= Backoff(initial=0.5, factor=factor, maximum=7, jitter=0).delay(attempt) <= 7


@pytest.mark.parametrize(
    ("backoff", "attempt", "seconds"),
    [
        pytest.param(
            Backoff(initial=1, factor=1.001, jitter=0),
            20_000,
            3600,
        ),
        pytest.param(
            Backoff(initial=0, factor=1000.0, jitter=0),
            400,
            0,
        ),
        (Backoff(initial=0, factor=2.0, jitter=0), 5000, 0),
        (Backoff(initial=5, factor=1.0, jitter=0), 5000, 5),
        (Backoff(initial=5, factor=1.0, maximum=3, jitter=0), 1, 3),
    ],
)
def test_backoff_follows_its_formula_to_the_end(backoff, attempt, seconds):
    assert backoff.delay(attempt) == seconds


@pytest.mark.parametrize(("rng", "seconds"), [(0.0, 6.0), (0.5, 8.0), (0.999999999, 10.0), (0.75, 9.0)])
def test_jitter_bounds(rng, seconds):
    assert Backoff(initial=8, jitter=0.25).delay(1, rng=lambda: rng) == pytest.approx(seconds)


def test_jitter_applies_at_the_maximum_too_and_spreads():
    """Without it all that failed together would come again together."""
    delays = [Backoff(initial=100, maximum=10, jitter=0.2).delay(5) for _ in range(200)]
    assert 8 <= min(delays) < 9
    assert 11 < max(delays) <= 12


def test_full_jitter_is_never_negative():
    assert Backoff(jitter=1).delay(1, rng=lambda: 0.0) == 0
