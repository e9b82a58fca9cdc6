"""Samples of the backlog: one subscriber per minute counts it, and what nobody counts is a gap."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import publish
from django_mysqlqueue.models import ConsumerGroup, QueueMessage, Rollup
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.options.backoff import Backoff
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler
from tests.support.inspected import group_of
from tests.support.internals import Count, Entered, GroupRef, Session, maintenance, pruning, rollups, samples, unclaimed
from tests.support.scenarios import G, log

pytestmark = pytest.mark.still_clock

MINUTE_MS = 60_000


def maintain(*subs):
    """A round of the maintenance of each."""
    for sub in subs:
        for _ in sub.poller.maintenance.round():
            pass


def sampled(grain=rollups.MINUTE, ref=G):
    """The samples that are stored, by time."""
    found = rollups.since(Session(USING), grain, 0)
    return [(one.backlog, one.oldest_ms // 1000) for one in found if one.ref == ref and one.backlog is not None]


def at_second(clock, second=10):
    """Moves the clock to this second of the next minute: no test runs over the end of a minute."""
    now = Session(USING).now()
    clock.advance((second - now / 1000) % 60 + (60 if (second - now / 1000) % 60 < 1 else 0))


def test_the_process_that_samples_a_minute_prunes_for_all(db, clock, monkeypatch):
    at_second(clock)
    pruned = []
    monkeypatch.setattr(pruning, "prune", lambda using, **options: iter(pruned.append(using) or ()))
    first, second = Sub(handler()), Sub(handler())
    maintain(first, second)
    assert len(pruned) == 1
    clock.advance(60)
    maintain(second, first)
    assert len(pruned) == 2
    other = Sub(handler(group="other"))
    maintain(first, other)
    assert len(pruned) == 3, "a group that nobody has sampled in this minute"


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_sample_is_the_backlog_of_the_overview(db, clock, mode):
    at_second(clock)
    waits = Backoff(initial=3600, jitter=0)
    sub = Sub(handler(function=fail, mode=mode, max_attempts=3, backoff=waits), claim_size=3)
    log(20, "abcd")
    sub.step()
    sub.work(2)
    sub.flush()
    sub.step()
    clock.advance(5)
    maintain(sub)
    group = group_of(*G)
    assert group.in_flight
    assert group.retrying
    assert group.lag == Count(20)
    ((backlog, oldest),) = sampled()
    assert backlog == group.lag
    assert 5 <= oldest <= 8
    assert sampled(rollups.HOUR) == [(backlog, oldest)]


def test_a_group_without_a_backlog_has_a_sample_of_nothing(db, clock):
    at_second(clock)
    sub = Sub(handler())
    log(3)
    sub.settle()
    maintain(sub)
    assert sampled() == [(Count(0), 0)]


def test_messages_of_before_the_start_offset_and_for_other_groups_do_not_count(db, clock):
    at_second(clock)
    log(5)
    sub = Sub(handler(group="late", start="latest"), handler())
    log(2)
    QueueMessage.objects.filter(payload=b"0").update(target_group="late")
    maintain(sub)
    assert sampled(ref=GroupRef("late", "t")) == [(Count(2), 0)]
    assert sampled()[0][0] == group_of(*G).lag


def test_a_paused_group_is_sampled(db, clock):
    at_second(clock)
    sub = Sub(handler())
    pausing.set_paused(USING, G, actor="ada", paused=True)
    log(4)
    sub.step()
    maintain(sub)
    assert sampled()[0][0] == Count(4)


def test_a_minute_that_has_counts_is_sampled(db, clock):
    """The row of the minute is there before, because deliveries have ended."""
    at_second(clock)
    Sub(handler())
    log(2)
    rollups.add(USING, {G: rollups.Tally(failed=1)})
    assert Rollup.objects.filter(grain=rollups.MINUTE, sampled_at=0).exists()
    assert set(samples.claim(USING, [G], {})) == {G}


def test_positions_are_those_of_one_group_and_topic(db):
    mine, others = Sub(handler(), claim_size=1), Sub(handler("t", "h"), handler("u", "g"))
    log(4, keys="a")
    log(6, keys="a", topic="u")
    others.settle()
    mine.step()
    highest = max(held.offset for held in mine.inbox.held(G))
    assert unclaimed.positions(Session(USING), G, ["a", "none"]) == {"a": (0, highest)}


def test_the_age_is_that_for_the_group(db, clock):
    """A group that was registered later waits since then."""
    at_second(clock)
    sub = Sub(handler())
    log(2)
    clock.advance(25)
    later = Sub(handler("t", "h"))
    ConsumerGroup.objects.filter(consumer_group="h").update(registered_at=Session(USING).now() - 5000)
    maintain(sub, later)
    ((_, oldest),) = sampled()
    ((_, oldest_of_later),) = sampled(ref=GroupRef("h", "t"))
    assert 25 <= oldest <= 28
    assert 5 <= oldest_of_later <= 8


def test_the_partition_furthest_behind_has_the_age_when_the_count_has_stopped(db, clock, monkeypatch):
    monkeypatch.setattr(samples, "FURTHEST", 1)
    sub = Sub(handler())
    log(3, keys="a")
    sub.settle()
    oldest = log(1, keys="b")[-1]
    log(3, keys="a")
    sample = samples.Sample(USING, G, 0)
    sample.begin()
    sample.add(["a", "b"])
    monkeypatch.setattr(samples, "MOST", -1)
    sample.count()
    assert sample.is_counted()
    assert sample._first == oldest


def test_only_one_subscriber_counts_in_a_minute(db, clock):
    at_second(clock)
    one, two = Sub(handler(), name="one"), Sub(handler(), name="two")
    log(4)
    maintain(one)
    log(4)
    with CaptureQueriesContext(connection) as captured:
        maintain(two)
    sent = [query["sql"] for query in captured.captured_queries]
    assert not [sql for sql in sent if "UPDATE queue_rollups" in sql or "INSERT INTO queue_rollups" in sql]
    assert len([sql for sql in sent if "sampled_at" in sql]) == 1
    assert [backlog for backlog, _ in sampled()] == [Count(4)]
    clock.advance(60)
    maintain(two, one)
    assert [backlog for backlog, _ in sampled()] == [Count(4), Count(8)]


def test_two_claims_of_one_minute(db, clock):
    at_second(clock)
    Sub(handler())
    session = Session(USING)
    minute = session.now() // MINUTE_MS * MINUTE_MS
    assert samples.claim(USING, [G], {}) == {G: minute}
    assert samples.claim(USING, [G], {}) == {}
    other = GroupRef("h", "t")
    assert samples.claim(USING, [G, other], {}) == {other: minute}


def test_two_claims_of_one_minute_at_the_same_time(db, clock, monkeypatch):
    """Both have read that nobody has the minute: the row decides, and what entered is counted once."""
    at_second(clock)
    Sub(handler())
    minute = Session(USING).now() // MINUTE_MS * MINUTE_MS
    before = {minute - MINUTE_MS: {("t", ""): 3}}
    claimed, run = [], samples.run

    def late(using, write):
        if not claimed:
            claimed.append(None)
            claimed.append(samples.claim(USING, [G], before))
        return run(using, write)

    monkeypatch.setattr(samples, "run", late)
    assert samples.claim(USING, [G], before) == {}
    assert claimed[1] == {G: minute}
    assert Rollup.objects.get(grain=60, bucket_at=minute - MINUTE_MS).entered == 3


def test_whoever_claims_a_minute_and_is_killed_leaves_a_gap(db, clock):
    at_second(clock)
    sub = Sub(handler())
    log(4)
    assert samples.claim(USING, [G], {})
    maintain(sub)
    assert sampled() == []
    assert Rollup.objects.get(grain=60).backlog is None
    clock.advance(60)
    maintain(sub)
    assert [backlog for backlog, _ in sampled()] == [Count(4)]


def test_the_hour_keeps_the_highest_sample(db, clock):
    at_second(clock)
    Rollup.objects.all().delete()
    minute = Session(USING).now() // MINUTE_MS * MINUTE_MS
    samples.claim(USING, [G], {})
    for backlog, oldest in ((Count(5), 3000), (Count(9, exact=False), 2000), (Count(1), 9000)):
        samples.store(USING, G, minute, backlog, oldest)
    assert sampled(rollups.HOUR) == [(Count(9, exact=False), 9)]


@pytest.mark.parametrize(
    ("most", "expected"), [(4, Count(4, exact=False)), (11, Count(11, exact=False)), (12, Count(12))]
)
def test_a_long_backlog_is_not_counted_to_its_end(db, clock, monkeypatch, most, expected):
    at_second(clock)
    monkeypatch.setattr(samples, "MOST", most)
    monkeypatch.setattr(samples, "PIECE", 2)
    monkeypatch.setattr(samples, "ROWS", 4)
    Sub(handler(), name="reads nothing")
    log(12, "abcdef")
    # The oldest message is in the last partition.
    QueueMessage.objects.filter(partition_key__lt="f").update(published_at=Session(USING).now())
    first = QueueMessage.objects.filter(partition_key="f").order_by("offset").values_list("offset", flat=True)[0]
    QueueMessage.objects.filter(partition_key__lt="f", offset__lt=first).delete()
    log(12 - QueueMessage.objects.count(), "a")
    clock.advance(30)
    maintain(Sub(handler()))
    ((backlog, oldest),) = sampled()
    assert backlog == expected
    assert oldest >= 30


def test_claimed_messages_are_not_counted_to_their_end(db, clock, monkeypatch):
    at_second(clock)
    monkeypatch.setattr(samples, "MOST_CLAIMED", 3)
    sub = Sub(handler())
    log(6)
    sub.step()
    maintain(sub)
    assert [backlog for backlog, _ in sampled()] == [Count(3, exact=False)]


def test_a_group_that_is_dropped_while_it_is_counted(db, clock):
    at_second(clock)
    sub = Sub(handler())
    log(4)
    assert samples.claim(USING, [G], {})
    sample = samples.Sample(USING, G, Session(USING).now() // MINUTE_MS * MINUTE_MS)
    ConsumerGroup.objects.all().delete()
    sample.begin()
    sample.add(["a"])
    sample.end()
    assert sampled() == [(Count(0), 0)]
    sub.poller.reset()


def test_an_idle_poll_sends_nothing_for_samples(db, clock):
    """All that samples cost is in the maintenance, once a minute."""
    sub = Sub(handler())
    sub.settle()
    with CaptureQueriesContext(connection) as captured:
        sub.step(tick=False)
    assert captured.captured_queries
    assert not [query["sql"] for query in captured.captured_queries if "rollups" in query["sql"]]


# -- what enters the log ---------------------------------------------------------


def entered(grain=rollups.MINUTE, ref=G):
    """The numbers of messages that entered the log, and of the minutes in which they were counted, by row."""
    found = rollups.since(Session(USING), grain, 0)
    return [(one.entered, one.entered_minutes) for one in found if one.ref == ref and one.entered_minutes]


def test_the_next_sample_brings_what_entered_the_log_in_the_minute_before(db, clock):
    at_second(clock, 40)
    sub = Sub(handler(), handler("u", "h"))
    sub.step()
    maintain(sub)
    at_second(clock, 10)
    sub.step()  # The first poll of a minute that it sees as a whole.
    log(3)
    log(2, topic="u")
    publish("elsewhere", 1)
    sub.step()
    maintain(sub)
    assert entered() == []
    at_second(clock, 7)  # Less than a minute after the last poll.
    sub.step()
    log(50)
    sub.step()
    other = Sub(handler(), name="began just now")
    other.step()
    maintain(sub, other)
    assert entered() == [(3, 1)]
    assert entered(ref=GroupRef("h", "u")) == [(2, 1)]
    assert sum(number for number, _ in entered(rollups.HOUR)) == 3


def test_messages_for_another_group_do_not_enter_this_one(db, clock):
    """A replay publishes copies for one group: for the others, nothing comes in."""
    at_second(clock, 40)
    sub = Sub(handler(), handler("t", "h"))
    sub.step()
    maintain(sub)
    at_second(clock, 10)
    sub.step()
    offsets = log(5, keys="a")
    QueueMessage.objects.filter(offset__in=offsets[:3]).update(target_group="h")
    QueueMessage.objects.filter(offset=offsets[3]).update(target_group="nobody")
    sub.step()
    at_second(clock, 7)
    sub.step()
    maintain(sub)
    assert entered() == [(1, 1)]
    assert entered(ref=GroupRef("h", "t")) == [(4, 1)]


def test_who_has_not_read_a_whole_minute_brings_no_number(db, clock):
    at_second(clock, 40)
    sub = Sub(handler())
    sub.step()
    log(3)
    sub.step()
    at_second(clock, 10)
    sub.step()
    maintain(sub)
    assert [backlog for backlog, _ in sampled()] == [Count(3)]
    assert entered() == []


def test_minutes_that_were_read_whole():
    found = Entered()
    found.add(1_000_000 * MINUTE_MS + 30_000, {("t", ""): 5})
    assert found.whole() == {}
    begin = 1_000_001 * MINUTE_MS
    assert found.whole() == {}
    found.add(begin + 100, {("t", ""): 2})
    found.add(begin + 40_000, {("t", ""): 3, ("u", ""): 1})
    assert found.whole() == {}, "it is not over"
    found.add(begin + MINUTE_MS + 5, {("t", ""): 7})
    assert found.whole() == {begin: {("t", ""): 5, ("u", ""): 1}}
    found.add(begin + 2 * MINUTE_MS + 1, {})
    found.add(begin + 3 * MINUTE_MS, {})
    assert found.whole() == {begin + 2 * MINUTE_MS: {}}, "older ones are forgotten"


def test_the_first_minute_is_whole_only_if_an_earlier_one_was_polled():
    begin = 1_000_000 * MINUTE_MS
    found = Entered()
    found.add(begin, {("t", ""): 1})  # It may have missed messages of earlier in this millisecond.
    found.add(begin + MINUTE_MS, {})
    assert found.whole() == {}
    found.reset()
    found.add(begin + 3 * MINUTE_MS - 1, {("t", ""): 5})
    found.add(begin + 3 * MINUTE_MS, {("t", ""): 2})
    found.add(begin + 3 * MINUTE_MS, {("t", ""): 3})
    found.add(begin + 4 * MINUTE_MS, {})
    assert found.whole() == {begin + 3 * MINUTE_MS: {("t", ""): 5}}, "two polls in one millisecond are not a pause"


@pytest.mark.parametrize("step", [-1, 61_000])
def test_after_a_pause_or_a_jump_of_the_clock_the_minute_is_not_whole(step):
    found = Entered()
    begin = 1_000_000 * MINUTE_MS
    found.add(begin - 1000, {})
    found.add(begin + 10, {("t", ""): 1})
    found.add(begin + 10 + step, {("t", ""): 1})
    found.add(begin + MINUTE_MS + 20, {("t", ""): 1})
    assert begin not in found.whole()


def test_after_a_database_error_the_minute_is_not_whole(db, clock):
    at_second(clock, 40)
    sub = Sub(handler())
    sub.step()
    at_second(clock, 10)
    sub.step()
    sub.poller.reset()
    sub.step()
    at_second(clock, 7)
    sub.step()
    assert sub.poller.entered.whole() == {}


# -- when the maintenance runs ---------------------------------------------------


@pytest.mark.parametrize("lasts", [0.01, 1.0, 59.0, 61.0])
def test_each_minute_has_a_round(monkeypatch, lasts):
    """Rounds once began 45 to 75 seconds after the end of the last one: some minutes had none, and so no sample."""
    now = 1000.25
    monkeypatch.setattr(maintenance.time, "monotonic", lambda: now)
    keeping = maintenance.Maintenance(
        USING,
        [],
        [],
        check_tail=lambda session: None,
        clock=lambda: round((now + 77) * 1000),
        entered=dict,
        apart=lambda group: contextlib.nullcontext(),
    )
    began = []

    def turns():
        nonlocal now
        began.append((now + 77) // 60)
        now += lasts
        yield

    monkeypatch.setattr(keeping, "round", turns)
    for _ in range(20):
        now = max(now, keeping.next_at)
        keeping.turn()
    minutes = list(began[1:])  # The first round may be in any minute.
    between = {later - earlier for earlier, later in itertools.pairwise(minutes)}
    assert between <= ({1.0} if lasts < 60 else {2.0})
