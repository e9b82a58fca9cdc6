"""What waits for a slot, against a dict that is searched: everything that may happen to it, in any order."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from django_mysqlqueue.options.delivery_limits import DeliveryLimits, parse_rate
from tests.support.internals import LONGEST_REST_MS, Claim, Flushed, GroupRef, Inbox, Limited, Rest

pytestmark = pytest.mark.promise("Limits")

REF = GroupRef("g", "t")
PARTITIONS = ["a", "b", "c"]
KEYS = ["", ":x", ":y"]
LIMITS = [
    DeliveryLimits(rate_per_key=parse_rate("10/m"), burst=1),
    DeliveryLimits(max_in_flight_per_key=1),
    DeliveryLimits(),
]
TIMES = st.sampled_from([0, 1, 2, 10, LONGEST_REST_MS + 5])
RESTS = st.builds(Rest, TIMES, st.sampled_from(KEYS), st.booleans(), st.booleans())


def limited_group():
    return Limited(Inbox([REF], leases_good=lambda: True), REF, "s", lease_ms=30_000)


def claimed(limited=(), rest=None):
    return Claim(Flushed(), partitions=dict(limited), rest=rest)


class LimitedMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.limited = limited_group()
        self.limits = DeliveryLimits()
        self.now = 0
        self.resting = {}
        self.whole = None

    def taken(self, keys):
        for key in keys:
            del self.resting[key]

    @rule(limits=st.sampled_from(LIMITS))
    def configure(self, limits):
        assert sorted(self.limited.configure(limits)) == sorted(self.resting)
        self.limits = limits
        self.forget_all()

    @rule()
    def reset(self):
        self.limited.reset()
        self.forget_all()

    def forget_all(self):
        self.resting.clear()
        self.whole = None

    @rule(found=st.dictionaries(st.sampled_from(PARTITIONS), RESTS, min_size=1), whole=st.none() | RESTS)
    def claim(self, found, whole):
        """With something delivered: the pauses after fruitless claims have a length of their own."""
        result = claimed(found, rest=whole)
        result.deliveries = [None]
        self.limited.claimed(result, self.now)
        self.resting.update(found)
        self.whole = whole or self.whole

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def finish(self, keys):
        freed = [key for key, rest in self.resting.items() if rest.in_flight and rest.key in keys]
        if not self.limits.counts_in_flight:
            freed = []
        elif self.whole is not None and self.whole.in_flight:
            self.whole = None
        assert self.limited.finished(keys) == freed
        self.taken(freed)

    @rule(key=st.sampled_from(PARTITIONS))
    def forget(self, key):
        self.limited.forget(key)
        self.resting.pop(key, None)

    @rule(now=TIMES, answers=st.fixed_dictionaries({key: st.none() | RESTS for key in KEYS}))
    def rested(self, now, answers):
        self.now = now

        def over(rest):
            return rest.until <= now or rest.until > now + LONGEST_REST_MS

        due = []
        for key, rest in sorted(self.resting.items(), key=lambda one: (one[1].until, one[0])):
            if not over(rest):
                break
            due.append(key)
        asks = any(not self.resting[key].is_certain for key in due)
        expected = {key for key in due if self.resting[key].is_certain}
        later = {}
        if asks:
            uncertain = {key: answers[rest.key] for key, rest in self.resting.items() if not rest.is_certain}
            expected |= {key for key, rest in uncertain.items() if rest is None}
            later = {key: rest for key, rest in uncertain.items() if rest is not None}
        found = self.limited.rested(now, lambda keys: [answers[key] for key in keys])
        assert len(found) == len(set(found))
        assert set(found) == expected
        self.taken(expected)
        for key, rest in later.items():
            until = self.limited._resting[key].until  # never earlier: a pause is added if nothing was found
            assert until >= rest.until
            self.resting[key] = rest._replace(until=until)
        if self.whole is not None and over(self.whole):
            self.whole = None

    @invariant()
    def it_is_the_model(self):
        assert {key for key in PARTITIONS if self.limited.rests(key)} == set(self.resting)
        assert len(self.limited) == len(self.resting)
        times = [rest.until for rest in self.resting.values()]
        if self.whole is not None:
            times.append(self.whole.until)
        assert self.limited.next_at() == min(times, default=None)


def test_what_waits_for_a_slot_in_any_order():
    stateful.run_state_machine_as_test(
        LimitedMachine, settings=hypothesis_settings(max_examples=100, stateful_step_count=30, deadline=None)
    )


def test_a_partition_that_rests_again_until_the_same_time_is_over_once():
    limited = limited_group()
    limited.configure(DeliveryLimits(rate_per_key=parse_rate("10/m"), burst=1))
    result = claimed({"k": Rest(1000, ":k", False, True)})
    limited.claimed(result, 0)
    limited.forget("k")
    limited.claimed(result, 0)
    assert limited.rested(2000, lambda keys: []) == ["k"]
    assert limited.rested(2000, lambda keys: []) == []
