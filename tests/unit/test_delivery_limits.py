"""The arithmetic of limits: what a throttle lets start, and the keys of limits."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_mysqlqueue.options.delivery_limits import (
    AHEAD_US,
    NO_KEY,
    NO_LIMITS,
    START_WITHIN_US,
    DeliveryLimits,
    KeyRates,
    Rate,
    Throttle,
    parse_key_rates,
    parse_rate,
)

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [("100/s", 100, "s"), (" 5 / m ", 5, "m"), ("1000/h", 1000, "h"), ("1/d", 1, "d"), ("10000/s", 10_000, "s")],
)
def test_rates(text, count, unit):
    assert parse_rate(text) == Rate(count, unit)
    assert parse_rate(str(parse_rate(text))) == parse_rate(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0/s", "must be at least 1"),
        ("-1/s", "must be a number and a unit"),
        ("5", "must be a number and a unit"),
        ("5/w", "must be a number and a unit"),
        ("1.5/s", "must be a number and a unit"),
        ("\u0665/s", "must be a number and a unit"),
        (5, "must be a number and a unit"),
        (None, "must be a number and a unit"),
        ("10001/s", "must be at most 10000 per second"),
        ("99999999999/d", "must be a number and a unit"),
        ("9999999999/d", "must be at most 10000 per second"),
    ],
)
def test_what_is_no_rate(text, says):
    with pytest.raises(ValueError, match=says):
        parse_rate(text)


def test_rates_by_key():
    rates = parse_key_rates({"b": "5/s", "*": "1/m", "a": None, "7": Rate(2, "h")})
    assert rates == KeyRates((("7", Rate(2, "h")), ("a", None), ("b", Rate(5, "s"))), Rate(1, "m"))
    assert parse_key_rates(rates.as_json()) == parse_key_rates(rates) == rates
    assert parse_key_rates({"a": "1/s"}) != rates
    assert hash(parse_key_rates(rates.as_json())) == hash(rates)
    assert parse_key_rates("5/s") == Rate(5, "s")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "must have a rate for at least one key, or for '[*]': all other keys"),
        ({"a": None, "*": None}, "must have a rate for at least one key"),
        ({"a": "5/w"}, "has '5/w' for 'a': a rate must be a number and a unit"),
        ({"*": "0/s"}, re.escape("has '0/s' for '*': a rate must be at least 1")),
        ({"a": {"b": "5/s"}}, "for 'a': a rate must be a number and a unit"),
        ({7: "5/s"}, "has the key 7: a key must be a string of at most 190 characters"),
        ({"k" * 191: "5/s"}, "a key must be a string of at most 190 characters"),
        ({str(n): "5/s" for n in range(1001)}, "has 1,001 keys: at most 1,000 are allowed"),
        (["5/s"], "must be a number and a unit"),
    ],
)
def test_what_is_no_rates_by_key(value, says):
    with pytest.raises(ValueError, match=says):
        parse_key_rates(value)


def test_keys_without_a_rate_are_not_limited():
    some = DeliveryLimits(rate_per_key=parse_key_rates({"a": "5/s", "\n": "1/s", "": "2/s"}))
    assert [some.key_of(key, {}) for key in ("a", "b", "", "*", None)] == [":a", NO_KEY, ":", NO_KEY, NO_KEY]
    assert some.rate_of(some.key_of("\n", {})) == Rate(1, "s")
    assert (some.rate_of(":a"), some.rate_of(NO_KEY), some.throttle_of(":b")) == (Rate(5, "s"), None, None)
    assert some.limits_some_keys
    others = DeliveryLimits(rate_per_key=parse_key_rates({"a": None, "*": "5/s"}), limit_by="tenant")
    assert [others.key_of(None, {"tenant": value}) for value in ("a", "b", 7)] == [NO_KEY, ":b", ":7"]
    assert not others.limits_some_keys
    counted = DeliveryLimits(rate_per_key=parse_key_rates({"a": "5/s"}), max_in_flight_per_key=2)
    assert counted.key_of("b", {}) == ":b", "its messages in flight are limited"
    assert not counted.limits_some_keys


rates = st.builds(Rate, st.integers(1, 2000), st.sampled_from("smh"))


@given(rates, st.none() | st.integers(1, 500), st.integers(0, 2**32))
def test_within_a_period_no_more_than_the_rate_and_a_burst_start(rate, burst, seed):
    """However claims are spread, however late a start is, and although some slots are not used."""
    chance = random.Random(seed)
    throttle = Throttle.of(rate, burst)
    allowed = rate.count + (burst if burst is not None else max(1, -(-rate.count * START_WITHIN_US // rate.period_us)))
    now, full_at = 10**15, 0
    starts: list[int] = []
    while len(starts) < 400:
        now += chance.choice([0, throttle.interval_us // 2, throttle.interval_us * chance.randrange(20), SECOND])
        for _ in range(chance.randrange(60)):
            slot = throttle.next_slot(full_at, now)
            if slot > now + AHEAD_US:
                break
            full_at = throttle.reserve(full_at, slot)
            starts.append(slot + chance.randrange(START_WITHIN_US))
    starts.sort()
    first = 0
    for last, moment in enumerate(starts):
        while starts[first] < moment - rate.period_us:
            first += 1
        assert last - first + 1 <= allowed


@given(rates)
def test_by_default_the_rate_is_kept(rate):
    """The average is within one percent, or within the microsecond to which it is rounded."""
    throttle = Throttle.of(rate, None)
    assert throttle.interval_us <= rate.period_us / rate.count * 1.01 + 1


def test_a_small_burst_costs_throughput():
    assert round(SECOND / Throttle.of(parse_rate("100/s"), 1).interval_us) == 84
    assert round(SECOND / Throttle.of(parse_rate("100/s"), None).interval_us) == 100
    assert Throttle.of(parse_rate("100/s"), 50).tolerance_us == 29 * 10_000


def test_a_slower_rate_before_does_not_block_a_new_one():
    slow, fast = Throttle.of(parse_rate("1/d"), None), Throttle.of(parse_rate("5/s"), None)
    now = 10**15
    full_at = fast.corrected(slow.reserve(0, now), now)
    assert fast.next_slot(full_at, now) <= now + AHEAD_US + 200_001
    assert fast.corrected(full_at, now - 1_000_000) == full_at, "another claim may have waited for the lock meanwhile"


@pytest.mark.parametrize(
    ("limit_by", "key", "metadata", "expected"),
    [
        (None, "a", {}, ":a"),
        (None, "", {}, ":"),
        (None, None, {"tenant": "x"}, NO_KEY),
        ("tenant", "a", {"tenant": "x"}, ":x"),
        ("tenant", "a", {"tenant": 5}, ":5"),
        ("tenant", "a", {"tenant": True}, ":true"),
        ("tenant", "a", {"tenant": {"b": 1, "a": "ö"}}, ':{"a": "ö", "b": 1}'),
        ("tenant", "a", {"tenant": None}, NO_KEY),
        ("tenant", "a", {}, NO_KEY),
    ],
)
def test_keys(limit_by, key, metadata, expected):
    assert DeliveryLimits(rate_per_key=Rate(1, "s"), limit_by=limit_by).key_of(key, metadata) == expected
    assert DeliveryLimits(rate=Rate(1, "s")).key_of(key, metadata) == NO_KEY


@pytest.mark.parametrize("value", ["x" * 191, "\ud800", "a\nb", "a\x00b"])
def test_keys_that_a_column_cannot_hold_are_hashed(value):
    key = DeliveryLimits(rate_per_key=Rate(1, "s"), limit_by="tenant").key_of(None, {"tenant": value})
    assert key.startswith("#")
    assert len(key) == 65
    key.encode()


def test_text():
    limits = DeliveryLimits(Rate(100, "s"), Rate(5, "s"), None, 20, 2, "tenant")
    assert limits.text == "100/s, 5/s per tenant, 20 in flight, 2 in flight per tenant"
    by_key = parse_key_rates({"a": "5/s", "b": None, "*": "1/m"})
    assert DeliveryLimits(rate_per_key=by_key).text == "5/s for key 'a', no rate for key 'b', 1/m per other key"
    many = parse_key_rates(dict.fromkeys("abcde", "5/s"))
    text = "5/s for tenant 'a', 5/s for tenant 'b', 5/s for tenant 'c', rates for 2 more"
    assert DeliveryLimits(rate_per_key=many, limit_by="tenant").text == text
    assert not NO_LIMITS
    assert not NO_LIMITS.text
    assert not DeliveryLimits(burst=5)
