"""Keys and when they are due, against a dict that is searched."""

from __future__ import annotations

from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.internals import SPARE, Timers

KEYS = st.sampled_from("abcd")
TIMES = st.integers(0, 5)


class TimersMachine(RuleBasedStateMachine):
    """Few keys and few times, so that the same key often has a time that it has had before."""

    def __init__(self):
        super().__init__()
        self.timers, self.model = Timers(), {}

    @rule(key=KEYS, time=TIMES)
    def set(self, key, time):
        self.timers.set(key, time)
        self.model[key] = time

    @rule(key=KEYS)
    def discard(self, key):
        self.timers.discard(key)
        self.model.pop(key, None)

    @rule(now=TIMES)
    def pop(self, now):
        due = sorted((time, key) for key, time in self.model.items() if time <= now)
        assert self.timers.pop(lambda time: time <= now) == [key for _, key in due]
        for _, key in due:
            del self.model[key]

    @rule(now=TIMES, bound=TIMES)
    def pop_before_or_after(self, now, bound):
        """As with times that a clock, since corrected, has left far in the future: up to the first that is not due."""
        found = []
        for time, key in sorted((time, key) for key, time in self.model.items()):
            if not (time <= now or time > bound):
                break
            found.append(key)
            del self.model[key]
        assert self.timers.pop(lambda time: time <= now or time > bound) == found

    @rule()
    def clear(self):
        self.timers.clear()
        self.model.clear()

    @invariant()
    def first_is_the_earliest(self):
        assert self.timers.first() == min(self.model.values(), default=None)


def test_timers_are_a_dict_that_is_searched():
    stateful.run_state_machine_as_test(
        TimersMachine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


def test_keys_that_leave_before_they_are_due_do_not_fill_the_memory():
    timers = Timers()
    for number in range(10_000):
        timers.set("k", number % 2)
        timers.set(number, 10**9)
        timers.discard(number)
    assert len(timers._heap) <= 2 + SPARE
    assert timers.first() == 1
