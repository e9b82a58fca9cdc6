"""Handler threads for messages with slots, while messages without slots would take all threads all the time."""

from __future__ import annotations

import threading
import time
from queue import Queue
from types import SimpleNamespace

import pytest

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState
from django_mysqlqueue.options.delivery_limits import parse_key_rates, parse_rate
from tests.support.claims import claimant_of
from tests.support.harness import Sub, handler
from tests.support.internals import (
    Action,
    Claim,
    Claimed,
    ClaimRequest,
    Due,
    Flushed,
    GroupRef,
    Inbox,
    Left,
    Limited,
    Rest,
    Settlement,
    Slot,
    Want,
    limited,
    starts,
)

pytestmark = [pytest.mark.promise("Limits")]

REF = GroupRef("g", "t")
BUSY = 0.15
"""Seconds that a handler takes: longer than a slot would wait for a thread."""


@pytest.fixture
def patient(monkeypatch):
    """A kept thread waits for the claims of a slow machine, too."""
    monkeypatch.setattr(starts, "KEPT", 1.0)


def work(sub, started, outcome=lambda claimed: Action.ACK):
    """A handler thread."""
    batch = None
    while (batch := sub.inbox.take(batch)) is not None:
        (held,) = batch.items
        started.append(held.claimed)
        time.sleep(BUSY)
        sub.inbox.finish(batch, [Settlement(held.claimed, outcome(held.claimed), delay_ms=10)])


def run(sub, started, until, **options):
    """Runs handler threads beside the poller until a condition holds."""
    sub.step(times=3)
    number = sub.context.threads
    threads = [threading.Thread(target=work, args=(sub, started), kwargs=options) for _ in range(number)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 40
    try:
        while not until() and time.monotonic() < deadline:
            sub.beat()
            sub.step(tick=False)
            sub.inbox.wait(0.05)
    finally:
        sub.inbox.close()
        for thread in threads:
            thread.join()


def messages_with_slots(limited, *, others, prefetch, threads, mode="shared"):
    """Lets a subscriber start 40 deliveries while all kinds wait in the log; returns how many of them have slots."""
    if limited == "group":
        ones = [handler(group="a", topic="a", mode=mode, rate=parse_rate("100/s")), handler(mode=mode)]
    else:
        ones = [handler(mode=mode, rate_per_key=parse_key_rates({"a": "100/s"}))]
    sub = Sub(*ones, threads=threads, prefetch=prefetch, claim_size=min(prefetch, 100))
    publish_many("t", [Message(n, key=f"k{n % others}") for n in range(max(1000, 5 * others))])
    publish_many("a" if limited == "group" else "t", [Message(n, key="a") for n in range(200)])
    started = []
    run(sub, started, lambda: len(started) >= 40)
    assert all(claimed.slot is None or claimed.key == "a" or claimed.ref.topic == "a" for claimed in started)
    return sum(claimed.slot is not None for claimed in started[:40])


@pytest.mark.parametrize("prefetch", [20, 200])
@pytest.mark.parametrize("others", [10, 60, 200])
@pytest.mark.parametrize("limited", ["group", "key"])
def test_messages_with_slots_and_others_take_turns(db, patient, limited, others, prefetch):
    assert 8 <= messages_with_slots(limited, others=others, prefetch=prefetch, threads=2) <= 32


@pytest.mark.parametrize(("limited", "others", "prefetch"), [("group", 200, 200), ("key", 10, 20), ("key", 200, 200)])
def test_they_take_turns_in_order(db, patient, limited, others, prefetch):
    assert 8 <= messages_with_slots(limited, others=others, prefetch=prefetch, threads=2, mode="ordered") <= 32


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_claim_takes_only_the_messages_with_slots_that_can_start_soon(still, mode):
    rates = dict.fromkeys("abcdef", "100/s")
    sub = Sub(handler(mode=mode, rate_per_key=parse_key_rates(rates)), threads=3, claim_size=20)
    publish_many("t", [Message(n, key=key) for n in range(10) for key in (*rates, "k", "l")])
    sub.step()
    waiting = [held.key for held in sub.inbox.held(REF)]
    assert sub.inbox.slots(REF)[""] == sum(key in rates for key in waiting) == 3
    assert len(waiting) >= 15, "claims of messages that need no slots are as large as without limits"


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_half_a_claim_is_for_messages_that_need_no_slots(still, mode):
    sub = Sub(handler(mode=mode, rate_per_key=parse_key_rates({"a": "1000/s"})), threads=50, claim_size=10)
    publish_many("t", [Message(n, key="a") for n in range(100)])
    publish_many("t", [Message(n, key=f"k{n}") for n in range(100)])
    sub.step(times=2)
    (group,) = sub.poller.groups
    first, *others = group.planner.wants(0, 10)
    assert (first.key, first.look_at) == ("a", 5)
    assert len(others) >= 5


def test_no_thread_is_kept_if_none_is_needed_or_nothing_could_start(db):
    """Each condition in turn; then one is kept."""
    sub = Sub(handler(mode="shared", rate_per_key=parse_key_rates({"a": "100/s"})), threads=1)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(5)])
    sub.step()
    (group,) = sub.poller.groups

    def keeps():
        group.limited.keep_thread(group.memory.todo, group.mode.is_free)
        kept = not sub.inbox.keep_thread(REF)
        sub.inbox.free_thread(REF)
        return kept

    group.memory.todo["a"] = None
    assert not keeps(), "a thread is idle"
    running = sub.take()
    group.limited._rest = Rest(sub.context.clock.now() + 60_000, "", in_flight=False)
    assert not keeps(), "the group has no slot"
    group.limited._rest = None
    del group.memory.todo["a"]
    group.memory.todo["k9"] = None
    assert not keeps(), "nothing that needs slots is known of"
    group.memory.todo["a"] = None
    assert keeps()
    sub.run(running)
    assert sub.take() is not None
    assert not keeps(), "one was kept a moment ago"
    group.limited._kept_at = 0.0
    assert keeps(), "another message without a slot has started"
    group.limited._kept_at = 0.0
    assert not keeps(), "they take turns, and none of the others has started since"


def test_no_thread_is_kept_for_a_lower_priority_than_that_of_what_waits(db):
    sub = Sub(handler(mode="shared", rate_per_key=parse_key_rates({"a": "100/s"})), threads=1)
    (group,) = sub.poller.groups
    publish_many("t", [Message(n, key=f"k{n}", priority=priority) for n, priority in enumerate((0, 0, 1, 1))])
    sub.step(times=2)
    running = sub.take()
    group.memory.todo["a"] = None
    group.limited.keep_thread(group.memory.todo, group.mode.is_free)
    assert sub.inbox.keep_thread(REF), "none was kept: a message with a higher priority waits"
    sub.inbox.free_thread(REF)
    sub.run(running)
    assert sub.take() is not None
    group.limited.keep_thread(group.memory.todo, group.mode.is_free)
    assert not sub.inbox.keep_thread(REF), "one was kept: what waits has the same priority"


def test_no_thread_is_kept_for_a_partition_whose_message_is_in_flight(db):
    sub = Sub(handler(rate_per_key=parse_key_rates({"a": "100/s"})), threads=1)
    publish_many("t", [Message(1, key="a"), *(Message(n, key=f"k{n}") for n in range(5))])
    sub.step()
    while (held := sub.take()).claimed.key != "a":
        sub.run(held)
    (group,) = sub.poller.groups
    group.notify(["a"])
    group.turn()
    assert sub.inbox.keep_thread(REF), "none was kept: the message behind can start only after the one in flight"
    sub.inbox.free_thread(REF)
    sub.run(held)
    sub.flush()
    assert sub.take() is not None
    group.notify(["a"])
    group.turn()
    assert not sub.inbox.keep_thread(REF), "one was kept"


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("limited", ["group", "key"])
def test_they_take_turns_with_any_number_of_threads(db, patient, limited, threads):
    assert 8 <= messages_with_slots(limited, others=60, prefetch=20, threads=threads) <= 32


def test_retries_with_slots_get_a_thread(db):
    one = handler(mode="shared", rate_per_key=parse_key_rates({"a": "100/s"}), max_attempts=None)
    sub = Sub(one, threads=2, prefetch=10, claim_size=10)
    publish_many("t", [Message(n, key="a") for n in range(2)])
    publish_many("t", [Message(n, key=f"k{n % 10}") for n in range(1000)])
    started = []

    def attempts():
        return [claimed.attempt for claimed in started if claimed.key == "a"]

    run(
        sub,
        started,
        lambda: attempts().count(3) >= 2,
        outcome=lambda claimed: Action.NACK if claimed.key == "a" else Action.ACK,
    )
    assert attempts().count(3) >= 2
    assert len(started) > len(attempts())


def test_a_thread_waits_for_a_claim_only_for_a_moment(db, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(starts, "time", SimpleNamespace(monotonic=lambda: now))
    sub = Sub(handler(mode="shared"), threads=2)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(5)])
    sub.step()
    sub.inbox.keep_thread(REF)
    assert sub.take() is None
    others = []
    thread = threading.Thread(target=lambda: others.append(sub.take()))
    thread.start()
    thread.join()
    assert others != [None], "only one thread is kept"
    assert sub.take() is None
    now += starts.KEPT
    assert sub.take() is not None
    assert sub.take() is not None
    sub.inbox.keep_thread(REF)
    assert sub.take() is None
    sub.inbox.free_thread(REF)
    assert sub.take() is not None
    assert DeliveryState.objects.count() == 5


@pytest.mark.parametrize("stop", ["paused", "refused"])
def test_a_stopped_group_claims_no_redeliveries_and_keeps_no_thread(db, monkeypatch, stop):
    one = handler(mode="shared", rate_per_key=parse_key_rates({"a": "100/s"}), max_attempts=None)
    sub = Sub(one, threads=1)
    publish_many("t", [Message(n, key=key) for n, key in enumerate("akk")])
    sub.step()
    while (held := sub.take()).claimed.key != "a":
        sub.run(held)
    batch = sub._batches.pop(id(held))
    sub.inbox.finish(batch, [Settlement(held.claimed, Action.NACK)])
    sub.inbox.leave(batch)
    sub.flush()
    (group,) = sub.poller.groups
    group.limited.has_due = True
    if stop == "refused":
        # The row of a group that a later release has given a filter that this one cannot parse.
        group.override(group.configuration.columns._replace(filter='{"later": 1}'))
        assert group.configuration.refused
    else:
        group.configuration.stopped = True
    monkeypatch.setattr(limited, "AHEAD", 3600.0)  # What has started lately would count, on a busy machine.
    assert group.limited.room() == 1, "a thread is idle"
    for _ in range(3):
        group.notify(["a"])
        group.turn()
    assert sub.inbox.slots(REF) == {}
    assert DeliveryState.objects.get(partition_key="a").retry_count == 1
    running = sub.take()
    assert running is not None
    group.turn()
    assert sub.inbox.keep_thread(REF), "none was kept"
    sub.inbox.free_thread(REF)
    sub.run(running)
    group.reset()
    assert not group.limited.has_due
    if stop == "paused":
        sub.step()
        assert sub.inbox.slots(REF)[":a"] == 1, "it claims again"


def test_only_the_group_for_which_a_thread_is_kept_frees_it(db):
    a = handler(group="a", topic="a", mode="shared", rate_per_key=parse_key_rates({"x": "100/s"}))
    one = handler(mode="shared", rate_per_key=parse_key_rates({"a": "100/s"}))
    sub = Sub(a, one, threads=2)
    assert sub.inbox.keep_thread(REF)
    assert not sub.inbox.keep_thread(a.ref), "another one is kept"
    publish_many("a", [Message(1, key="x"), Message(2, key="k")])
    publish_many("t", [Message(n, key=f"k{n}") for n in range(5)])
    sub.step()
    sub.inbox.free_thread(a.ref)
    assert not sub.inbox.keep_thread(REF), "claims of others, and of messages without slots, have not freed it"
    for group in sub.poller.groups:
        if group.ref == REF:
            group.memory.todo["a"] = None  # A hint that is out of date: it has no message.
            group.turn()
    assert sub.inbox.keep_thread(REF), "a claim has found nothing that needs slots"


def test_another_idle_thread_starts_what_the_kept_one_must_not(db, monkeypatch):
    monkeypatch.setattr(starts, "KEPT", 20)
    sub = Sub(handler(mode="shared"), threads=2).step()
    wait = sub.inbox._work.wait
    monkeypatch.setattr(sub.inbox._work, "wait", lambda timeout: wait())  # Only for a notification.
    started = Queue()
    threads = [threading.Thread(target=lambda: started.put(sub.inbox.take(None))) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while len(sub.inbox._work._waiters) < 2:
            time.sleep(0.01)
        sub.inbox.keep_thread(REF)
        publish_many("t", [Message(1)])
        sub.step()
        assert started.get(timeout=10) is not None
    finally:
        sub.inbox.close()
        for thread in threads:
            thread.join()


SLOT = Claimed(REF, "a", 1, 7, 1, suspect=False, size=0, slot=Slot(":a", 0.0, 1.0))
NO_SLOT = Claimed(REF, "k", 2, 7, 1, suspect=False, size=0)


@pytest.mark.parametrize(
    ("was_due", "asked", "found", "frees"),
    [
        (True, {"due": Due(5, with_slots=2)}, [], True),
        (True, {"due": Due(5, with_slots=2)}, [NO_SLOT], True),
        (True, {"due": Due(5, with_slots=2)}, [NO_SLOT, SLOT], False),
        (False, {"due": Due(5, with_slots=2)}, [], False),
        (True, {}, [], False),
        (True, {"due": Due(5, with_slots=0)}, [], False),
        (False, {"wants": [Want("k", look_at=1)]}, [NO_SLOT], False),
        (False, {"wants": [Want("k", look_at=1), Want("a", look_at=1)]}, [NO_SLOT], True),
        (False, {"wants": [Want("k", look_at=1), Want("a", look_at=1)]}, [NO_SLOT, SLOT], False),
    ],
)
def test_a_claim_frees_the_thread_if_it_has_looked_for_slots_in_vain(was_due, asked, found, frees):
    one = handler(mode="shared", rate_per_key=parse_key_rates({"a": "100/s"}))
    inbox = Inbox([REF], leases_good=lambda: True)
    limited = Limited(inbox, REF, "s", lease_ms=30_000)
    limited.configure(one.limits)
    limited.has_due = was_due
    inbox.keep_thread(REF)
    request = ClaimRequest(claimant_of(REF, "s", 5, 60_000), **{"wants": (), "token": 7, **asked})
    left = {} if was_due else {("k", 1): Left.NEEDS_SLOT}
    limited.looked(request, Claim(Flushed(), deliveries=found, left=left))
    assert inbox.keep_thread(REF) == frees
    looked = "due" in asked
    assert limited.has_due == (was_due != looked), "only a claim of redeliveries knows whether it has left some out"


def test_a_batch_occupies_one_thread(db):
    sub = Sub(handler(mode="shared", batch=True, batch_size=10), threads=2)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    sub.step()
    batch = sub.inbox.take(None)
    assert len(batch.items) == 10
    assert sub.inbox.free_calls(GroupRef("g", "t")) == [1]
