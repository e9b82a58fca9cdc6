"""Suspected poison messages: who takes them, and what goes on beside them."""

from __future__ import annotations

import os

import pytest
from django.db.models import Case, When

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, JobResult, QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from tests.app import jobs
from tests.support import job_worlds
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, lag, sequence, take_all
from tests.support.internals import Unstarted, redelivering, registry, releasing, settling, unstarted

pytestmark = [pytest.mark.promise("Poison messages"), pytest.mark.still_clock]


def lose(one, number, clock, prefix="s"):
    """Publish messages, claim them, and lose the subscriber."""
    publish_many("t", (Message(f"{prefix}{n}", key=f"{prefix}{n}") for n in range(number)))
    lost = Sub(one, threads=4, claim_size=number, prefetch=2 * number).step(times=4)
    assert lost.inbox.waiting(one.ref)[0] == number
    clock.advance(61)


def started(sub, rounds=5):
    return [held for _ in range(rounds) for held in take_all(sub)]


def suspects(held):
    return [item for item in held if item.claimed.suspect]


@both_modes
@pytest.mark.parametrize("number", [5, 200])
def test_others_go_on_beside_a_suspect(db, clock, mode, number):
    """Those that waited in a process took all its room, so that it claimed nothing else."""
    one = handler(mode=mode, prefetch=200)
    lose(one, number, clock)
    publish_many("t", (Message(n, key=f"new{n}") for n in range(3)))
    held = started(Sub(one, threads=4))
    assert len(suspects(held)) == 1
    assert sorted(item.claimed.key for item in held if not item.claimed.suspect) == ["new0", "new1", "new2"]


def test_redeliveries_go_on_beside_a_suspect(db, clock):
    """They come behind many suspects in the index."""
    one = handler(mode="shared", backoff=Backoff(initial=60, jitter=0), function=lambda delivery: delivery.nack())
    publish_many("t", (Message(n, key=f"again{n}") for n in range(3)))
    first = Sub(one)
    first.settle()
    first.leave()
    lose(one, 100, clock)
    DeliveryState.objects.filter(retry_count=1).update(invisible_until=2**40)
    DeliveryState.objects.exclude(retry_count=1).update(invisible_until=2)
    held = started(Sub(one, threads=4, claim_size=10))
    assert len(suspects(held)) == 1
    assert sorted(item.claimed.key for item in held if not item.claimed.suspect) == ["again0", "again1", "again2"]


def test_a_process_takes_one_suspect_and_leaves_the_others_to_others(db, clock):
    one = handler(mode="shared")
    lose(one, 20, clock)
    heirs = [Sub(one, threads=4) for _ in range(3)]
    assert [len(suspects(started(heir))) for heir in heirs] == [1, 1, 1]


def test_a_process_takes_one_suspect_of_all_its_groups(db, clock):
    groups = [handler(mode="shared"), handler(topic="u", mode="ordered")]
    publish_many("u", (Message(n, key=f"k{n}") for n in range(5)))
    publish_many("t", (Message(n, key=f"k{n}") for n in range(5)))
    Sub(*groups).step()
    clock.advance(61)
    heir = Sub(*groups, threads=4)
    assert len(suspects(started(heir))) == 1


@both_modes
def test_suspects_follow_one_another_at_once(db, clock, mode):
    """Each as soon as the outcome of the one before is written, without another poll."""
    got = Recorder()
    one = handler(mode=mode, function=got)
    lose(one, 30, clock)
    heir = Sub(one, threads=4).step()
    for _ in range(30):
        assert heir.work() == 1
        heir.flush()
        for group in heir.poller.groups:
            while group.wants_turn():
                group.turn()
    assert sorted(got.payloads) == sorted(f"s{n}" for n in range(30))
    assert lag() == 0


@pytest.mark.promise("Order")
def test_messages_behind_a_suspect_that_waits_do_not_overtake_it(db, clock):
    """And the messages of a partition with several suspects stay in order."""
    got = Recorder()
    one = handler(function=got)
    publish_many("t", (Message((key, n), key=key) for n in range(3) for key in "abc"))
    Sub(one).step()
    clock.advance(61)
    publish_many("t", (Message((key, 3), key=key) for key in "abcd"))
    heir = Sub(one, threads=4)
    heir.settle()
    for key in "abc":
        assert [n for k, n in got.payloads if k == key] == [0, 1, 2, 3]
    assert got.payloads.index(["d", 3]) < 4
    assert lag() == 0


@both_modes
def test_a_suspect_that_is_not_due_holds_up_no_other(db, clock, mode):
    """It was lost twice, and waits for its backoff."""
    one = handler(mode=mode, backoff=Backoff(initial=100, jitter=0))
    lose(one, 3, clock)
    DeliveryState.objects.filter(partition_key="s0").update(suspect=True, retry_count=1)
    (held,) = suspects(started(Sub(one, threads=4)))
    assert held.claimed.key in ("s1", "s2")


def test_a_claim_finds_a_suspect_behind_many_that_others_have_locked(db, clock, monkeypatch):
    """It looks at more of them as its window grows."""
    one = handler(mode="shared")
    lose(one, 40, clock)
    locked = set(DeliveryState.objects.order_by("message_offset").values_list("partition_key", "message_offset")[:30])
    DeliveryState.objects.update(
        invisible_until=Case(When(message_offset__in=[at for _, at in locked], then=2), default=3)
    )
    lock_due = redelivering._lock_due

    def free(session, ref, due):
        return {row: found for row, found in lock_due(session, ref, due).items() if row not in locked}

    monkeypatch.setattr(redelivering, "_lock_due", free)
    assert len(suspects(started(Sub(one, threads=4, claim_size=10), rounds=10))) == 1


# -- what a supervisor knows of a dead process ------------------------------------


@pytest.fixture
def memory():
    memory = unstarted.create()
    yield memory
    os.close(memory)


def die(one, memory, *, starts):
    """Claim everything, start some of it, and lose the subscriber. Another process releases what it held."""
    sub = Sub(one, threads=starts, unstarted=Unstarted(memory)).step()
    held = [sub.take() for _ in range(starts)]
    released = releasing.release_unstarted(USING, sub.handlers, unstarted.read(memory))
    assert released == DeliveryState.objects.filter(delivered_by="").count()
    releasing.release_all(USING, sub.name, sub.handlers, shared=[one.ref] if one.shared else [])
    return held


@both_modes
def test_what_a_dead_process_had_not_started_is_no_suspect(db, memory, mode):
    publish_many("t", (Message(n, key=f"k{n}") for n in range(10)))
    one = handler(mode=mode)
    lost = {item.claimed.offset for item in die(one, memory, starts=3)}
    assert len(lost) == 3
    held = started(Sub(one, threads=20))
    assert len(held) == 8
    assert suspects(held) == [item for item in held if item.claimed.offset in lost]
    assert {item.claimed.attempt for item in held} == {1}


@pytest.mark.promise("Order")
def test_what_had_not_started_stays_behind_what_had(db, memory):
    got = Recorder()
    one = handler(function=got)
    publish_many("t", (Message(n, key="k") for n in range(5)))
    die(one, memory, starts=1)
    publish("t", 5, key="k")
    Sub(one, threads=4).settle()
    assert got.payloads == list(range(6))


@both_modes
def test_a_message_that_kills_its_process_is_dead_lettered_however_much_waits(db, memory, mode):
    """And those that waited behind it lose no attempt, nor their place beside it."""
    publish_many("t", (Message(n, key=f"k{n}") for n in range(10)))
    one = handler(mode=mode, max_attempts=3)
    for attempt in (0, 1, 2, 3):
        sub = Sub(one, threads=20, unstarted=Unstarted(memory)).step()
        poison = next(held for held in iter(sub.take, None) if held.body.payload == b"0")
        assert poison.claimed.suspect == bool(attempt)
        if attempt:
            assert settling.record_start(USING, poison.claimed)
        releasing.release_unstarted(USING, sub.handlers, unstarted.read(memory))
        releasing.release_all(USING, sub.name, sub.handlers, shared=[one.ref] if one.shared else [])
    got = Recorder()
    Sub(handler(mode=mode, function=got, max_attempts=3)).settle()
    sequence()
    assert QueueMessage.objects.get(topic="t_dlq").failure_count == 3
    assert sorted(got.attempts) == [(n, 1) for n in range(1, 10)]


@both_modes
def test_what_others_have_taken_meanwhile_is_theirs(db, clock, memory, mode):
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3)))
    one = handler(mode=mode)
    Sub(one, unstarted=Unstarted(memory)).step()
    clock.advance(61)
    other = Sub(one).step()
    assert other.take() is not None
    before = list(DeliveryState.objects.order_by("pk").values())
    assert releasing.release_unstarted(USING, [one.ref], unstarted.read(memory)) == 2
    held = [row for row in before if row["delivered_by"] == other.name]
    assert held
    assert [row for row in DeliveryState.objects.order_by("pk").values() if row in held] == held


@both_modes
def test_a_suspect_that_had_not_started_stays_one(db, clock, memory, mode):
    one = handler(mode=mode)
    lose(one, 1, clock)
    die(one, memory, starts=0)
    (held,) = started(Sub(one))
    assert held.claimed.suspect
    assert held.claimed.attempt == 1


@pytest.mark.promise("Jobs")
def test_a_job_that_had_not_started_is_ready_again(db, no_handlers, settings, memory):
    settings.TASKS = job_worlds.TASKS
    result = jobs.plain.enqueue(1)
    sub = Sub(*registry.handlers().values(), unstarted=Unstarted(memory)).step()
    result.refresh()
    assert result.status == "RUNNING"
    assert releasing.release_unstarted(USING, sub.handlers, unstarted.read(memory)) == 1
    row = JobResult.objects.get()
    assert (row.status, row.worker_ids, row.errors, row.last_attempted_at) == ("READY", "", "", 0)


def test_notes_that_find_no_place_are_left_out(memory, monkeypatch):
    """Their messages are suspected after a loss, as without a supervisor."""
    monkeypatch.setattr(unstarted, "ENTRIES", 4)
    first, second = (Unstarted(memory, number, 2) for number in range(2))
    places = [first.note(offset, 7) for offset in (1, 2, 3)]
    assert places[2] == -1
    assert second.note(4, -9) not in places
    assert sorted(unstarted.read(memory)) == [(1, 7), (2, 7), (4, -9)]
    for place in places:
        first.erase(place)
    assert unstarted.read(memory) == [(4, -9)]
    assert first.note(5, 8) in places
