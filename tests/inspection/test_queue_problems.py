"""What makes a problem of the queue as a whole, how severe it is, since when, and what it names: each bound."""

from __future__ import annotations

import dataclasses

import pytest

from django_mysqlqueue.inspection import queue_problems, subscriber_problems
from django_mysqlqueue.inspection.bounds import StallTimes
from django_mysqlqueue.inspection.outbox import DueMessages, OutboxOverview, RefusedMessage, RelayBacklog
from django_mysqlqueue.inspection.overview import QueueOverview
from django_mysqlqueue.inspection.schedules import ScheduleRun, ScheduleStatus
from django_mysqlqueue.inspection.subscribers import SubscriberStatus
from django_mysqlqueue.models import PartitionLease
from tests.inspection.test_group_problems import NOW, G, ago, group, head, live
from tests.support.harness import USING
from tests.support.internals import Count, Holder, RoundTrip, Session, open_transactions

TIMES = StallTimes(outbox=15, tick=60)


def overview(*groups, due=None, sequenced=10**6, relays=()):
    outbox = OutboxOverview({} if due is None else {"t": DueMessages(Count(3), ago(due))}, {}, Count(0), None)
    return QueueOverview(USING, NOW, 1, ago(sequenced), 0, outbox, groups, Count(0), False, 600, ("t",), relays)


def shown(problems):
    return [
        (p.kind, p.severity, None if p.since is None else (NOW - p.since) / 1000, p.messages.value) for p in problems
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"due": 14}, [("outbox", 2, 14, 3)]),
        ({"due": 15}, [("outbox", 0, 15, 3)]),
        ({"due": 15, "sequenced": 15}, [("outbox", 0, 15, 3)]),
        ({"due": 15, "sequenced": 14}, [("outbox_behind", 2, 15, 3)]),
        ({"due": 59, "sequenced": 14}, [("outbox_behind", 2, 59, 3)]),
        ({"due": 60, "sequenced": 14}, [("outbox_behind", 1, 60, 3)]),
    ],
)
def test_due_messages_are_a_problem_after_a_while(values, expected):
    assert shown(queue_problems.outbox(Session(USING), overview(**values), TIMES)) == expected


def test_due_messages_are_none_at_once_if_a_subscriber_runs_or_a_group_has_the_problem():
    def found(one):
        return shown(queue_problems.outbox(Session(USING), overview(one, due=14), TIMES))

    assert found(group(subscribers=[live()])) == []
    assert found(group(head(5))) == []
    assert found(group()) == [("outbox", 2, 14, 3)]


@pytest.mark.parametrize(
    ("beats", "lease", "silent"),
    [((14,), 30, None), ((15,), 30, 15), ((17, 25), 30, 17), ((14, 25), 30, None), ((29,), 60, None), ((30,), 60, 30)],
)
def test_an_outbox_stalls_because_no_process_is_left_before_leases_expire(monkeypatch, settings, beats, lease, silent):
    """Then nobody is said to hold the sequencer, and its log does not matter."""
    settings.MYSQLQUEUE = {"LEASE_DURATION": lease}
    monkeypatch.setattr(open_transactions, "sequencer_holder", lambda session, *, least: Holder(7, "", None, True))
    one = group(subscribers=[dataclasses.replace(live(), heartbeat_at=ago(beat)) for beat in beats])
    (problem,) = queue_problems.outbox(Session(USING), overview(one, due=40), TIMES)
    assert (problem.kind, problem.severity) == ("outbox", 0)
    assert problem.text.endswith(
        "No subscriber is moving them." if silent is None else f"No subscriber has sent a heartbeat for {silent} s."
    )
    assert ("Connection 7" in problem.advice) == (silent is None)
    assert problem.advice.startswith("Check whether the subscribers still run") == (silent is not None)


@pytest.mark.parametrize(
    ("holder", "says"),
    [
        (
            Holder(7, "ada@%h", 90, True),
            "Connection 7 (ada@%h) has locked the sequencer. Its transaction has been open",
        ),
        (Holder(7, "", None, True), "Connection 7 (-) has locked the sequencer."),
        (Holder(7, "ada@h", 90, False), "Connection 7 (ada@h) may have locked the sequencer"),
    ],
)
def test_a_stalled_outbox_names_who_holds_the_sequencer(monkeypatch, holder, says):
    monkeypatch.setattr(open_transactions, "sequencer_holder", lambda session, *, least: holder)
    (problem,) = queue_problems.outbox(Session(USING), overview(group(subscribers=[live()]), due=15), TIMES)
    assert says in problem.advice
    assert problem.text.endswith("No subscriber is moving them."), "public pages show it"
    assert problem.advice.endswith("or KILL connection 7.")
    (problem,) = queue_problems.outbox(Session(USING), overview(group(), due=15), TIMES)
    assert "Connection" not in problem.advice, "without a subscriber, the lock explains nothing"


def round_trips(*found):
    subscribers = []
    for place, took in enumerate(found):
        one = live()
        info = one.info if took is None else {**one.info, "p50_us": took, "p95_us": 2 * took}
        subscribers.append(dataclasses.replace(one, name=f"s{place}", info=info))
    return overview(group(subscribers=subscribers))


@pytest.mark.parametrize(
    ("found", "most", "says", "subscriber"),
    [
        ((250_000,), 0.25, None, None),
        ((250_001,), 0.25, "of 1 of 1 live subscriber take longer than 250 ms; those of s0 take 250 ms (p50)", None),
        ((250_001,), None, None, None),
        ((None, 1000), 0.25, None, None),
        (
            (1000, 2_000_000),
            0.25,
            "of 1 of 2 live subscribers take longer than 250 ms; those of s1 take 2 s (p50) and 4 s",
            "s1",
        ),
        ((400_000, 300_000, None), 0.25, "of 2 of 2 live subscribers", None),
    ],
)
def test_a_database_is_slow_above_a_limit(found, most, says, subscriber):
    problems = list(queue_problems.slow_database(round_trips(*found), most))
    assert len(problems) == (says is not None)
    for problem in problems:
        assert says in problem.text
        assert (problem.kind, problem.severity, problem.subscriber) == ("slow_database", 1, subscriber)


def test_lost_subscribers_have_no_round_trip():
    lost = dataclasses.replace(live(is_live=False), info={"p50_us": 9_000_000, "p95_us": 9_000_000})
    assert overview(group(subscribers=[lost])).slowest_round_trip is None
    assert round_trips(1000, 3000, 2000).slowest_round_trip == RoundTrip(0.003, 0.006)


def test_lost_subscribers_are_told_if_anything_waits_or_they_have_leases(db):
    """Leases of another group, or of another subscriber, do not count."""

    def found(*heads, exact=True):
        subscribers = [live(is_live=False), dataclasses.replace(live(), name="alive")]
        one = dataclasses.replace(group(*heads, subscribers=subscribers), lag=Count(len(heads), exact=exact))
        problems = subscriber_problems.lost_subscribers(Session(USING), overview(one))
        return [(p.kind, p.severity, p.ref, p.subscriber, p.since) for p in problems]

    lost = ("silent", 2, G, "s", NOW)
    assert found() == []
    assert found(head(1)) == [lost]
    assert found(exact=False) == [lost], "it is not known whether anything waits"
    for owner, place in (("other", "t"), ("s", "u")):
        PartitionLease.objects.create(consumer_group="g", topic=place, partition_key="k", leased_by=owner)
    assert found() == []
    PartitionLease.objects.create(consumer_group="g", topic="t", partition_key="l", leased_by="s")
    assert found() == [lost]


@pytest.mark.promise("Health")
def test_a_lost_subscriber_is_none_from_its_replacement_on(db):
    """A history: two processes are lost, and one is replaced by one that is lost, too, and replaced in turn."""
    beats = {"a": (0, 600), "b": (0, 660), "c": (640, 900), "d": (930, None)}

    def found(minute):
        now = 60 * minute
        subscribers = []
        for name, (start, end) in beats.items():
            if start <= now:
                at = now if end is None else min(end, now)
                info = {"started_at": ago(3600 - start)}
                subscribers.append(SubscriberStatus(G, name, ago(3600 - at), 0, info, now - at < 30))
        return [
            one.subscriber
            for one in subscriber_problems.lost_subscribers(
                Session(USING), overview(group(head(5), subscribers=subscribers))
            )
        ]

    told = {minute: found(minute) for minute in range(40)}
    assert [told[minute] for minute in range(11)] == [[]] * 11
    # At minute 11, "c" has started after the last heartbeat of "a".
    assert [told[minute] for minute in range(11, 16)] == [[], ["b"], ["b"], ["b"], ["b"]]
    assert [told[minute] for minute in range(16, 40)] == [["c"]] * 24, "d replaces b: one of three is missing"
    beats["e"] = (1500, None)
    assert found(24) == ["c"]
    assert [found(minute) for minute in range(25, 60)] == [[]] * 35
    PartitionLease.objects.create(consumer_group="g", topic="t", partition_key="l", leased_by="a")
    assert found(30) == ["a"], "it still holds a partition"


def test_a_relay_is_a_problem_after_a_while_or_if_it_is_refused():
    def found(*arguments):
        problems = queue_problems.relays(overview(relays=(RelayBacklog("copy", *arguments),)), TIMES)
        return [(p.database, p.topic, p.offset, p.message_id, *shown([p])[0]) for p in problems]

    assert found(Count(2), ago(14)) == []
    assert found(Count(2), ago(15)) == [("copy", None, None, None, "relay", 0, 15, 2)]
    assert found(Count(0), None) == []
    refused = RefusedMessage("t", "m", 7, "too large")
    for seconds in (1, 20):
        assert found(Count(2), ago(seconds), refused) == [("copy", "t", 7, "m", "relay", 0, seconds, 2)]


def schedule(overdue, **values):
    defaults = {"task": "", "times": "", "timezone": "", "last_tick": 0, "last_run": 0, "skipped": 0, "paused_at": 0}
    next_tick = None if overdue is None else ago(overdue)
    given = {
        "registered_at": 0,
        "seen_at": NOW,
        "declared": True,
        "catch_up": "",
        "overlap": "",
        "runs": (),
        **defaults,
        **values,
    }
    return ScheduleStatus(name="n", topic="t", now=NOW, next_tick=next_tick, **given)


@pytest.mark.parametrize(
    ("one", "is_live", "expected"),
    [
        (schedule(None), True, []),
        (schedule(59), True, []),
        (schedule(60), True, [(0, 60, "has never run")]),
        (schedule(60, last_run=ago(90)), True, [(0, 60, "has not run since")]),
        (schedule(60, declared=False), True, [(2, 60, "delete it with queuerecurring")]),
        (schedule(60, declared=False), False, [(0, 60, "No subscriber is running.")]),
        (schedule(None, error="no"), True, [(1, None, "cannot run the recurring schedule n: no")]),
        (schedule(None, error="no", paused_at=1), True, []),
        (schedule(None, error="no", declared=False), True, []),
        (schedule(60, error="no"), True, [(1, None, "cannot run"), (0, 60, "has never run")]),
    ],
)
def test_a_schedule_that_is_overdue_or_cannot_run(monkeypatch, one, is_live, expected):
    monkeypatch.setattr(queue_problems, "list_schedules", lambda **options: [one])
    state = overview(group(subscribers=[live(is_live=is_live)]))
    problems = list(queue_problems.recurring(state, TIMES))
    assert [(p.severity, shown([p])[0][2]) for p in problems] == [item[:2] for item in expected]
    assert all(text in p.text for p, (*_, text) in zip(problems, expected, strict=True))
    assert {p.topic for p in problems} <= {"t"}


def run(status, *, finished=120, error="builtins.FileNotFoundError"):
    at = ago(finished) if finished else 0
    return ScheduleRun(
        "job:n:1", 1, by_hand=False, status=status, enqueued_at=1, started_at=1, finished_at=at, error=error
    )


@pytest.mark.parametrize(("seen", "severity"), [(59, 0), (60, 2)])
def test_without_subscribers_one_that_ran_without_a_schedule_tells_that_it_was_removed(monkeypatch, seen, severity):
    one, other = schedule(70, declared=False, seen_at=ago(300 + seen)), schedule(50, declared=False, seen_at=ago(300))
    monkeypatch.setattr(queue_problems, "list_schedules", lambda **options: [one, other])
    (problem,) = queue_problems.recurring(overview(), TIMES)
    assert (problem.severity, problem.since) == (severity, ago(70))
    assert problem.advice.startswith("Start" if severity == 0 else "Delete")


@pytest.mark.parametrize(
    ("runs", "severity", "text"),
    [
        ([run("FAILED")], 1, ": FileNotFoundError."),
        ([run("FAILED", error="shop.errors.Refused")], 1, ": shop.errors.Refused."),
        ([run("READY", finished=0), run("RUNNING", finished=0), run("FAILED", error="")], 1, "."),
        ([run("SUCCESSFUL"), run("FAILED")], None, ""),
        ([run("RUNNING", finished=0), run("SUCCESSFUL")], None, ""),
        ([], None, ""),
    ],
)
def test_the_last_job_of_a_schedule_has_failed(monkeypatch, runs, severity, text):
    monkeypatch.setattr(queue_problems, "list_schedules", lambda **options: [schedule(None, runs=tuple(runs))])
    found = list(queue_problems.recurring(overview(), TIMES))
    assert [(p.kind, p.severity, p.topic, p.since) for p in found] == (
        [] if severity is None else [("recurring_failed", severity, "t", ago(120))]
    )
    for problem in found:
        assert problem.text.startswith("The last job of the recurring schedule n failed at ")
        assert problem.text.endswith(text)


@pytest.mark.parametrize("values", [{"paused_at": 1}, {"declared": False}])
def test_the_failed_job_of_a_schedule_that_does_not_run_is_for_information(monkeypatch, values):
    """It is paused, or nobody declares it any more: there is no next job that could succeed."""
    one = schedule(None, runs=(run("FAILED"),), **values)
    monkeypatch.setattr(queue_problems, "list_schedules", lambda **options: [one])
    (problem,) = queue_problems.recurring(overview(), TIMES)
    assert (problem.kind, problem.severity) == ("recurring_failed", 2)
