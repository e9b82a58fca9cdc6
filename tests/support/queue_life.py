"""A life of the queue in which every function sends its statements, and who does what in it."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from django.db import IntegrityError, transaction
from django.db.models import F
from django.test import override_settings

from django_mysqlqueue import Message, cancel, operations, publish, publish_many, reschedule
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.inspection import (
    PAGES,
    Bounds,
    always_failing,
    beginnings,
    count_jobs,
    dead_letters,
    error_kinds,
    find_problems,
    get_job,
    get_overview,
    jobs,
    limited,
    list_errors,
    list_jobs,
    list_messages,
    list_partitions,
    list_quarantined,
    list_scheduled,
    list_schedules,
    log_entries,
    message_history,
    operations_log,
    outbox,
    partitions,
    reasons,
    subscriber_problems,
    subscribers,
    summarize_tasks,
)
from django_mysqlqueue.inspection import scheduled as timetable
from django_mysqlqueue.inspection.beginnings import Failed
from django_mysqlqueue.inspection.operations_log import OperationFilter
from django_mysqlqueue.inspection.subscribers import SubscriberStatus
from django_mysqlqueue.inspection.topics import summarize_topics
from django_mysqlqueue.management.commands.queuestatus import read_status
from django_mysqlqueue.models import (
    CoalesceKey,
    ConsumerOffset,
    DebouncedMessage,
    DeliveryState,
    JobResult,
    OutboxMessage,
    QueueMessage,
    Reader,
    RelayWatermark,
    Schedule,
    Sequencer,
    Slots,
)
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.rules import relayed_topic
from django_mysqlqueue.operations import (
    dead_lettering,
    moving,
    pausing,
    redriving,
    replaying,
    retrying,
    seeking,
    steps,
)
from django_mysqlqueue.operations.scheduled import CANCEL, NOW, change_rows
from django_mysqlqueue.operations.seeking import Position
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import DeliveryLimits, Rate
from django_mysqlqueue.options.topics import dlq_topic
from django_mysqlqueue.tails import reading
from django_mysqlqueue.testing import deliver_all
from tests.support import garbage, job_worlds, schedule_worlds
from tests.support.claims import claimant_of
from tests.support.filtering import EU, US
from tests.support.harness import USING, Sub, first_place, handler, lag, sequence
from tests.support.inspected import backlogs_of, group_of
from tests.support.internals import (
    Action,
    DeadLetterFilter,
    GroupRef,
    Left,
    Route,
    Session,
    Settlement,
    Subset,
    Ticker,
    Want,
    audit,
    claiming,
    coalescing,
    debouncing,
    delivery_events,
    groups,
    heartbeats,
    job_results,
    job_rows,
    job_stages,
    leasing,
    log,
    matching_offsets,
    payloads,
    pruning,
    quarantine,
    relaying,
    releasing,
    rollups,
    routing,
    run,
    schedules,
    scheduling,
    sequencing,
    settling,
    slots,
    watermarks,
)
from tests.support.internals import partitions as log_partitions
from tests.support.roles import as_role

OTHER = "queue"
KEYS = 20
ROUNDS = 12
"""Enough for what the script publishes; those groups that begin with the long log stay behind."""


@as_role("subscriber")
def live() -> None:
    """Everything that subscribers do: both modes, subsets, failures, losses, housekeeping, a look at the state.

    And what others do. In a function without a role it is a subscriber's work.
    """
    _publish()
    sequence()
    endings = {0: lambda d: d.nack(), 1: lambda d: d.snooze(0), 2: lambda d: d.reject("no")}
    seen = set()

    def handle(delivery):
        ending = endings.get(delivery.payload % 50)
        if ending is not None and (delivery.group, delivery.id) not in seen:
            seen.add((delivery.group, delivery.id))  # a snooze leaves the attempt alone
            ending(delivery)

    def atomic(delivery):
        if delivery.payload % 50 == 7:
            raise ValueError("on purpose")

    def batch(deliveries):
        deliveries[-1].reject("no")

    part = Subset.parse(["k1*", "k3"])
    whole = [
        handler(group="o", function=handle),
        handler(group="s", mode="shared", function=handle),
        handler(group="oa", function=atomic, atomic=True),
        handler(group="ob", function=batch, atomic=True, batch=True, batch_size=10, max_attempts=1),
    ]
    others = [handler(group="os"), handler(group="ss", mode="shared")]
    _life(Sub(*whole, claim_size=50), Sub(*others, name="part", subset=part, claim_size=50))
    for name in ("o", "s"):
        _lose_and_take_over(name)
    last = Sub(*whole)
    last.settle(rounds=ROUNDS)
    last.leave()
    _settle_many_partitions()
    _limit()
    _filter()
    _coalesce()
    _debounce()
    _tail()
    _relay()
    _quarantine()
    _waiting_jobs()
    _jobs()
    _recur()
    watermarks.create_missing(USING, GroupRef("o", "t"), ["gone"])
    assert garbage.collect(USING).offsets_rows
    QueueMessage.objects.create(
        topic="old", partition_key="k", message_id="i", payload=b"", created_at=1, published_at=1
    )
    for required in (True, False):
        with override_settings(MYSQLQUEUE={"ARCHIVE_REQUIRED": required}):
            assert garbage.collect(USING).messages == (0 if required else 1)
    with as_role("reader"):
        read_status(USING, PAGES)  # the command counts to the end, so it walks what is unsettled
    _operate(GroupRef("o", "t"))
    _operate(GroupRef("s", "t"))
    _administer(GroupRef("os", "t"))
    deliver_all(advance=1, groups=())
    end = Sub(handler(group="o"), handler(group="s", mode="shared"))
    end.settle(rounds=100)
    end.leave()


@as_role("publisher")
def _publish() -> None:
    """Everything that publishers do, but for jobs."""
    publish("t", 0, key="k0")
    publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(200)))
    publish_many("t", (Message(number, key="k1", delay=0.001) for number in range(5)))
    publish("t", 0, key="k0", metadata={"a": 1}, priority=3, expires_in=3600)


def _settle_many_partitions() -> None:
    """More of them at a time than ``watermarks`` reads one by one."""
    publish_many("wide", (Message(number, key=f"k{number}") for number in range(watermarks.FEW_PARTITIONS + 10)))
    wide = Sub(handler("wide", "w"))
    wide.settle()
    wide.leave()
    assert lag("w") == 0


def _limit() -> None:
    """A group with limits: messages that wait for slots in all ways, slots that are released and forgotten."""
    ref = GroupRef("l", "limited")
    limits = {"rate": Rate(5000, "s"), "rate_per_key": Rate(1, "h"), "max_in_flight": 90, "max_in_flight_per_key": 5}
    one = handler("limited", "l", mode="shared", **limits, limit_by="tenant")
    publish_many(
        "limited",
        (
            Message(number, key="k", metadata={"tenant": f"t{number % 5}"} if number < 50 else {})
            for number in range(80)
        ),
    )
    sub = Sub(one, threads=20).step()
    DeliveryState.objects.filter(consumer_group="l", delivery_token=0).update(invisible_until=1)
    sub.step()
    sub.work(10)
    publish_many("limited", (Message(number, key="k") for number in range(5)))
    sub.step()
    with as_role("reader"):
        read_status(USING, PAGES)
    sub.leave()
    _register(ref, "limits", {})
    slots.collect(USING)
    Slots.objects.filter(consumer_group="l").update(full_at=1)
    slots.collect(USING)
    end = Sub(handler("limited", "l", mode="shared"))
    DeliveryState.objects.filter(consumer_group="l", delivery_token=0).update(invisible_until=1)
    end.settle(rounds=50)
    end.leave()


def _filter() -> None:
    """Groups with a filter: claims that look deeper, under outdated options, and under others."""
    for mode in ("ordered", "shared"):
        ref = GroupRef(mode, "filtered")
        sub = Sub(handler("filtered", mode, mode=mode, filter=EU), claim_size=2)
        regions = ["us"] * 30 + ["eu"] * 5
        publish_many(
            "filtered", (Message(number, key="k", metadata={"region": one}) for number, one in enumerate(regions))
        )
        sub.settle()
        _register(ref, "filter", US.as_json())
        publish_many("filtered", (Message(number, key="k", metadata={"region": "us"}) for number in range(5)))
        sub.step(tick=False)
        assert sub.settle() == 5
        assert lag(mode, "filtered") == 0
        _register(ref, "filter", {})
        sub.leave()


@as_role("reader")
def _tail() -> None:
    """Reads without a group: along the partitions, and along the log because they are many."""
    session = Session(USING)
    end = log.end_of_log(session)
    for limits in (reading.PageLimits(messages=100), reading.PageLimits(partitions=1, walked=500)):
        page = reading.read_topic(session, "t", None, end - 500, limits)
        reading.read_topic(session, "t", "k1", page.position, limits)
        reading.read_topics(session, ["t", "wide"], end - 500, end, limits)
        reading.read_newest(session, "t", None, None, limits)
        reading.read_newest(session, "t", "k1", end, limits)
    assert reading.position_since(session, "t", session.now() - 600_000) < end
    with patch.object(log_partitions, "JUMPS", ()):  # as if the server read all messages of the topic
        for after in (None, "k1"):
            assert log_partitions.last_offsets(session, "t", limit=3, after=after)


def _relay() -> None:
    """Messages on their way to another database, which is the same one here."""
    publish_many("far", (Message(number, key=f"k{number}") for number in range(20)))
    OutboxMessage.objects.filter(topic="far").update(topic=relayed_topic("far", USING))
    sequence()
    while not relaying.relay(USING, USING, max_rows=12).messages:
        pass  # It reads what the log has of other topics.
    outbox.read_relays(Session(USING), [relayed_topic("far", USING)])
    first = first_place()
    relaying.note_refusal(USING, USING, first, "an error")
    assert relaying.refusal(Session(USING), USING).offset == first.offset
    RelayWatermark.objects.update(relayed_offset=0)  # Its process was killed: the position is compared with the log.
    assert relaying.relay(USING, USING).messages == 8
    assert relaying.has_arrived(Session(USING), USING, 1)
    run(USING, lambda session: relaying._go_back(session, USING, 10**15))  # It changes nothing.
    with override_settings(MYSQLQUEUE={"RETENTION": 0}):
        garbage.collect(USING)
    _move()


def _quarantine() -> None:
    """The log refuses two messages."""

    def refuse(ids: Sequence[int]) -> None:
        raise IntegrityError

    publish_many("t", range(2))
    ids = list(OutboxMessage.objects.values_list("pk", flat=True))[-2:]
    assert run(USING, lambda session: quarantine.append_each(session, refuse, ids)) == 2
    assert quarantine.in_due_order(Session(USING), ids) == ids
    OutboxMessage.objects.filter(pk__in=ids).delete()
    with as_role("operator"):
        with as_role("reader"):
            rows = [one.quarantine_id for one in list_quarantined(using=USING)]
            assert {*quarantine.topics(Session(USING), rows).values()} == {"t"}
            assert len(list_quarantined(topic="t", using=USING)) == 2
            operations.requeue_quarantined(rows, actor="test", dry_run=True)
        operations.delete_quarantined(rows[1:], actor="test")
        operations.requeue_quarantined(topic="t", actor="test")
    sequence()


@as_role("operator")
def _move() -> None:
    """A topic that comes from another database, and one that leaves."""
    ref = GroupRef("m", "moved")
    groups.register(OTHER, ref, mode="ordered", start="earliest")
    here = moving.Move("moved", OTHER, OTHER, USING, "test")
    moving.prepare(here)
    run(USING, lambda session: routing.set_route(session, "moved", Route(routing.HERE, OTHER)))
    moving.cancel(here)  # A cut had been interrupted.
    moving.prepare(here)
    moving.cut(here)
    moving.hand_over(here, ref)
    there = moving.Move("moved", USING, USING, OTHER, "test")
    moving.prepare(there)
    moving.cut(there)
    with as_role("subscriber"):
        publish("moved", 1)
        sequence()
    assert routing.route_of(Session(USING), "moved").target == OTHER
    assert moving.is_drained(USING, ref)
    moving.finish(there)
    assert moving.has_left(moving.Move("moved", OTHER, USING, OTHER, "test"), 0)
    _register(ref, "limits", {})
    Sequencer.objects.update(routes={})


@job_worlds.configured()
def _waiting_jobs() -> None:
    """Jobs that wait for their next attempts, in place and as copies, and are cancelled."""
    held = job_worlds.claimed(*job_worlds.ENDS)
    job_worlds.CHANGES["flush waits"].make(USING, held)
    assert job_worlds.wait_here(USING, held, "dead", job_worlds.LONG)
    assert job_worlds.wait_here(USING, held, "expired", job_worlds.SHORT)
    assert sum(copies for _, _, copies in job_worlds.waits().values()) == 3
    with as_role("reader"):
        (kind,) = list_errors(group=job_worlds.JOBS.group, using=USING).kinds
        assert kind.retrying
        assert always_failing._moved(Session(USING), [job_worlds.JOBS])[0]
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=9)
    with as_role("operator"):
        assert operations.retry(*job_worlds.JOBS, error="none has it", actor="test", dry_run=True).planned == 0
        assert operations.retry(*job_worlds.JOBS, ids=["nacked"], actor="test", dry_run=True).planned == 1
        assert operations.retry(*job_worlds.JOBS, at=later, actor="test").changed == 5
    with as_role("operator"):
        task: dict[str, Any] = {"task": job_worlds.PATH, "actor": "test"}
        assert operations.retry(*job_worlds.JOBS, **task, dry_run=True).planned == 5
        assert operations.retry(*job_worlds.JOBS, error="no", **task).changed == 1
        assert operations.cancel(job_worlds.JOBS.topic, limit=1, **task).changed == 1
        assert operations.cancel(job_worlds.JOBS.topic, list(held), actor="test").changed == 4
    DeliveryState.objects.filter(topic=job_worlds.JOBS.topic).update(acked=True)
    JobResult.objects.all().delete()
    QueueMessage.objects.filter(topic=job_worlds.JOBS.topic).delete()


@job_worlds.configured()
def _jobs() -> None:
    """Jobs that end in all ways, are restarted, cancelled and forgotten."""
    held = job_worlds.claimed(*job_worlds.ENDS)
    for name in ("flush", "restart", "cancel"):
        job_worlds.CHANGES[name].make(USING, held)
    with as_role("publisher"):
        job_worlds.enqueue(USING)
    job_worlds.scheduled("far")
    run(USING, lambda session: job_stages.insert(session, {"far:0000": 1}))
    JobResult.objects.filter(id="far").update(stage="far:0000")
    _read_jobs()
    with as_role("scheduler"):
        cancel("far", topic=job_worlds.JOBS.topic)
    sequence()
    run(USING, lambda session: job_stages.insert(session, {"dead:0000": 1}))
    JobResult.objects.filter(id="dead").update(stage="dead:0000", kept_key="dead")
    with as_role("operator"):
        redriving.redrive_all(USING, DeadLetterFilter(dlq_topic(job_worlds.JOBS.topic)), actor="test")
    job_worlds.insert_redriven(USING)
    _chains()
    JobResult.objects.filter(finished_at__gt=0).update(finished_at=1)
    job_worlds.CHANGES["collect"].make(USING, held)
    with as_role("scheduler"):
        for _ in range(2):
            job_worlds.enqueue_unique(USING)
    JobResult.objects.filter(unique_key=job_worlds.UNIQUE).update(unique_since=1, unique_for=1)
    with as_role("scheduler"):
        job_worlds.enqueue_unique(USING, kept=True)
    with as_role("publisher"):
        job_worlds.enqueue_chain(USING)
    OutboxMessage.objects.filter(topic=job_worlds.JOBS.topic).delete()
    assert job_worlds.end_skipped(USING) > 0
    lost = JobResult.objects.filter(errors__contains="JobDeleted", cancel_requested_at=0).latest("enqueued_at").id
    assert job_results.begin(USING, "worker", [lost]).rows[lost].status == "RUNNING"


def _chains() -> None:
    """A chain that comes to its second stage, and one whose first job is cancelled, restarted and asked to stop."""
    held = job_worlds.chained()
    names = (job_worlds.FIRST, job_worlds.SECOND)
    job_worlds.store_started(USING, names)
    for name in names:
        job_worlds.end_of(USING, held, name)
    stages = job_worlds.enqueue_chain(USING)
    ids = [stage[0].id for stage in stages]
    with as_role("scheduler"):
        job_worlds.request_cancel(USING, ids[0])
    run(USING, lambda session: job_results.restart(session, {ids[0]: ""}))
    assert set(job_rows.statuses(Session(USING), ids).values()) == {"READY"}
    assert job_stages.before(Session(USING), JobResult.objects.get(id=ids[1]).stage) is not None
    job_results.begin(USING, "worker", ids[:1])
    with as_role("scheduler"):
        job_worlds.request_cancel(USING, ids[0])
    assert job_rows.cancel_requested(Session(USING), ids) == {ids[0]}
    job_worlds.scheduled("much later")
    names = ["much later", *ids]
    with as_role("operator"):
        assert operations.cancel(job_worlds.JOBS.topic, names, actor="test", dry_run=True).planned == 3
        assert operations.cancel(job_worlds.JOBS.topic, names, actor="test").changed == 3


@as_role("reader")
def _read_jobs() -> None:
    """Everything that people look at of jobs."""
    session = Session(USING)
    task = jobs.tasks(session)[0]
    counts = count_jobs(using=USING)
    assert sum(one.value for one in counts.values()) > 5
    for status in (None, "READY", "FAILED"):
        for one in (None, task):
            for topic in (None, job_worlds.JOBS.topic):
                page = list_jobs(status=status, task=one, topic=topic, limit=1, using=USING)
                assert page.jobs
                end = session.now()
                list_jobs(status=status, task=one, topic=topic, since=1, until=end, after=page.after, using=USING)
    assert subscriber_problems.newest_jobs(session, task, "default", session.now(), most=9).waiting
    found = get_job(page.jobs[0].id, using=USING)
    assert found is not None
    offset = jobs.message_offset(session, found.summary)
    assert offset
    assert {one.task for one in summarize_tasks(using=USING).tasks} >= {found.summary.task}
    found_topics = summarize_topics(session, ["t"], (), (), 0, bounds=dataclasses.replace(PAGES, count=0))
    assert found_topics[0].oldest_at
    always_failing.find_tasks(session, {job_worlds.JOBS: 0}, least=1, recent=0)
    partitions.in_flight(session, job_worlds.JOBS)
    JobResult.objects.filter(status="READY").update(retry_at=session.now() + 60_000)
    assert jobs.waiting(session, limit=1)
    JobResult.objects.filter(status="READY").update(retry_at=0)


@job_worlds.configured()
def _recur() -> None:
    """Schedules that tick, are skipped, changed, paused, run by hand and deleted."""
    schedule_worlds.registered(schedule_worlds.of_task(overlap="skip"), age=70)
    for _ in range(2):
        schedule_worlds.tick(USING)
        Schedule.objects.update(last_tick=F("last_tick") - 60_000)
    schedule_worlds.registered(schedule_worlds.of_topic(), age=70, name="of a topic")
    assert schedules.tick(USING, "of a topic").published
    schedules.register(USING, {schedule_worlds.NAME: schedule_worlds.at_night(schedule_worlds.of_task())})
    schedules.note_seen(USING, [schedule_worlds.NAME])
    schedules.note_ended(USING, [schedule_worlds.NAME])
    with as_role("operator"):
        operations.run_recurring(schedule_worlds.NAME, actor="test")
        operations.pause_recurring(schedule_worlds.NAME, actor="test")
        operations.resume_recurring(schedule_worlds.NAME, actor="test")
        with as_role("reader"):
            assert [len(one.runs) for one in list_schedules(runs=2)] == [0, 2]
        Schedule.objects.update(seen_at=0)
        operations.delete_recurring(schedule_worlds.NAME, actor="test")
        operations.create_recurring("made", job_worlds.PATH, every=60, actor="test")
        operations.update_recurring("made", args=[5], actor="test")
        with as_role("reader"):
            assert {one.name for one in list_schedules() if one.editable} == {"made"}
    Schedule.objects.filter(name="made").update(last_tick=F("last_tick") - 130_000)
    ticker = Ticker(USING, ())
    ticker.notice(editable=True)
    ticker.turn()
    ticker.end()
    schedules.register(USING, {"made": schedule_worlds.of_task()})


def _debounce() -> None:
    """Debounced messages: replaced, bounded by the longest wait, cancelled, rescheduled, and left behind."""
    with as_role("publisher"), override_settings(MYSQLQUEUE={"TOPICS": {"unread": {"PARTITIONS": 3}}}):
        publish("unread", 0, key="k0", coalesce="c")
    with as_role("scheduler"):
        publish("debounced", 0, key="k", coalesce="c", delay=60)
        publish_many(
            "debounced",
            (Message(n, id=f"{n}", key="k", coalesce=f"c{n % 3}", delay=60 + n, max_delay=90) for n in range(12)),
        )
        cancel("1", topic="debounced")
        reschedule("2", topic="debounced", delay=60)
    DebouncedMessage.objects.filter(message_id="0").update(deliver_by=1)
    OutboxMessage.objects.filter(topic="debounced", message_id__in="04").update(deliver_at=1)
    sequence()
    assert QueueMessage.objects.filter(topic="debounced").count() == 1
    OutboxMessage.objects.filter(topic="debounced").update(deliver_at=1)
    sequence()
    assert not DebouncedMessage.objects.exists()
    DebouncedMessage.objects.create(
        outbox_id=10**9, topic="debounced", partition_key="k", message_id="0", coalesce_key="c"
    )
    debouncing.collect(USING, limit=1)
    assert not DebouncedMessage.objects.exists()


def _give_up(sub: Sub, mode: str) -> None:
    """A message that the filter no longer matches, but for which one was given up at its start."""
    publish("coalesced", "eu", key="k", coalesce="given up", metadata={"region": "eu"})
    sub.step()
    publish("coalesced", "both", key="k", coalesce="given up", metadata={"region": ["eu", "us"]})
    sequence()
    sub.work()
    superseding = QueueMessage.objects.filter(topic="coalesced").latest("offset")
    ref = GroupRef(mode, "coalesced")
    assert coalescing.is_superseding(Session(USING), ref, "k", superseding.offset, "given up")
    _register(ref, "filter", parse({"region": ["asia"]}).as_json())
    sub.settle()
    time.sleep(0.11)
    sub.settle()
    assert lag(mode, "coalesced") == 0


def _coalesce() -> None:
    """Messages with coalesce keys: superseded in claims, at the start and as retries, and those of another claim."""
    for mode in ("ordered", "shared"):
        failing: set[Any] = {0}

        def fail(delivery: Any, failing: set[Any] = failing) -> None:
            if delivery.payload in failing:
                failing.discard(delivery.payload)
                delivery.nack(delay=0.2 if delivery.payload else 0.001)

        handlers = [handler("coalesced", mode, mode=mode, function=fail, filter=one) for one in (EU,)]
        sub = Sub(*handlers)
        publish("coalesced", 0, key="k", coalesce="c", metadata={"region": "eu"})
        sub.step()
        sub.work()
        sub.flush()
        publish_many(
            "coalesced", (Message(number, key="k", coalesce="c", metadata={"region": "eu"}) for number in range(1, 9))
        )
        sequence()
        time.sleep(0.01)
        sub.step()
        publish("coalesced", 9, key="k", coalesce="c", metadata={"region": "eu"})
        sequence()
        sub.settle()
        failing |= {"k", "l"}
        publish_many(
            "coalesced",
            (
                Message(key, key=key, coalesce="passed", metadata={"region": one})
                for one in ("eu", "us")
                for key in "kl"
            ),
        )
        sub.settle()  # The later ones are passed.
        time.sleep(0.25)
        sub.settle()
        assert lag(mode, "coalesced") == 0
        _give_up(sub, mode)
        sub.leave()
    coalescing.collect(USING, limit=1)
    coalescing.collect(USING, after=("", "", "", ""))
    CoalesceKey.objects.create(
        consumer_group="", topic="gone", partition_key="k", coalesce_key="c", message_offset=10**12
    )
    assert coalescing.collect(USING)[0] == 1
    session = Session(USING)
    with as_role("reader"):
        newest = QueueMessage.objects.filter(topic="coalesced").latest("offset").offset
        content = message_history.read_history(session, newest, most=100, bounds=PAGES).content
        assert content is not None
        message_history.latest_with_key(session, content)
    assert coalescing.has_keys(session, "coalesced")
    assert coalescing.has_key(session, [content.entry.offset])


@as_role("operator")
def _operate(ref: GroupRef) -> None:
    """Everything that operators do to a group, and what the group does meanwhile."""
    session = Session(USING)
    mode = "ordered" if ref.group == "o" else "shared"
    held = _fail(ref, mode)
    for paused in (True, False):
        pausing.set_paused(USING, ref, actor="test", paused=paused)
        pausing.set_task_paused(USING, ref, "shop.tasks.mail", actor="test", paused=paused)
    operations.settings(*ref, {"prefetch": 200}, actor="test", dry_run=True)
    operations.settings(*ref, {"prefetch": 200}, actor="test")
    for dry_run in (True, False):
        assert operations.publish("t", 1, key="k1", actor="test", dry_run=dry_run).planned == 1
    in_log = QueueMessage.objects.filter(topic="t", partition_key="k1").values_list("message_id", "partition_key")[0]
    assert not operations.publish("t", 1, id=in_log[0], key=in_log[1], actor="test").changed
    first, *_others, last = QueueMessage.objects.filter(topic="t").order_by("offset").values_list("offset", flat=True)
    for number, key in enumerate((None, "k1")):
        for dry_run in (True, False):
            operations.replay(
                *ref, first, last, key=key, run=f"{ref.group}-{number}", limit=3, actor="test", dry_run=dry_run
            )
    with patch.object(replaying, "MERGED", 1):
        operations.replay(*ref, first, last, limit=3, actor="test", dry_run=True)
    groups.group_controls(session, [ref])
    heartbeats.bells(session, 30_000)
    _glance(session, ref)
    assert retrying.waiting(USING, ref, most=1000) >= 20
    assert retrying.waiting(USING, ref, most=1000, error="none has it") == 0
    waiting = DeliveryState.objects.filter(consumer_group=ref.group, delivered_by="", acked=False)
    offset = waiting.values_list("message_offset", flat=True)[0]
    rows = retrying.waiting_at(USING, ref, [offset])
    assert retrying.having(USING, ref, rows, "none has it") == []
    later = session.now() + 7200_000
    assert retrying.make_due(USING, ref, actor="test", rows=rows, error="", due=later) == 1
    assert retrying.make_due(USING, ref, actor="test", rows=rows) == 1
    assert retrying.make_due(USING, ref, actor="test", key="none") == 0
    with as_role("operator"):
        assert operations.retry(*ref, key="k1", actor="test", dry_run=True).planned
    assert len(dead_lettering.find(USING, ref, [offset])) == 1
    assert dead_lettering.dead_letter_now(USING, ref, [offset], actor="test") == 1
    assert retrying.make_due(USING, ref, actor="test", reset_attempts=True) >= 19
    assert {"t", "t_dlq"} <= set(log.known(session))
    assert held.name in heartbeats.names(session)
    with as_role("subscriber"):
        for error in ("it broke down", ""):
            heartbeats.report(USING, held.name, ref, error)
        heartbeats.refuse(USING, "refuser", {"refused": "it cannot start"})
    if mode == "ordered":
        assert leasing.owners(session, ref, ["k0", "none"]) == {"k0": held.name}
        assert leasing.revoke(USING, ref, ["k0", "k1"], actor="test") == 2
    with as_role("subscriber"):
        heartbeats.deregister(USING, held.name, [ref])
    assert heartbeats.remove(USING, held.name, actor="test", lease_ms=30_000) == 1
    for place in (seeking.position_of(USING, time_ms=session.now() - 1000), seeking.position_of(USING, "latest")):
        seeking.preview(USING, ref, place)
        seeking.move(USING, ref, place, actor="test")
    dead = DeadLetterFilter("t_dlq", group=ref.group, since=1)
    assert redriving.count(USING, dead, most=2) == 2
    with as_role("reader"):
        assert "t_dlq" in dict(dead_letters.dlq_topics(session))
        found = dead_letters.look(session, dead)
        assert dead_letters.look(session, DeadLetterFilter("t_dlq", offsets=found.offsets)).offsets == found.offsets
        for bounds in (PAGES, Bounds(errors=1, dead_letters=1)):
            assert list_errors(using=USING, bounds=bounds).kinds
        kind = next(one for one in list_errors(topic="t", group=ref.group, using=USING).kinds if one.dead_letters)
        assert error_kinds.of_kind(session, found, kind.text, shown=error_kinds.whole_line).offsets
        error_kinds.retrying_of_kind(session, ref, kind.text, shown=error_kinds.whole_line)
        dead_letters.look(session, DeadLetterFilter("t_dlq", error="no"))
        for bounds in (PAGES, Bounds(dead_letters=1)):
            assert dead_letters.look(session, DeadLetterFilter("t_dlq", key="k1"), bounds=bounds).offsets
        assert next(one.keys for one in list_errors(by_key=True, using=USING).kinds)
        assert list_errors(key="k1", using=USING).kinds
        full = dead_letters.one(session, dead_letters.at(session, found.offsets)[0].offset)
        assert full is not None
        message_history.recorded(session, full.listed.original_offset)
    places = [offset for page in matching_offsets(session, dead, size=10) for offset in page]
    assert list(matching_offsets(session, dead._replace(key="k1"), size=10))
    redriving.replace(USING, "t_dlq", places[0], "new", actor="test")
    assert (
        redriving.discard_all(USING, DeadLetterFilter("t_dlq", offsets=(places[1],)), actor="test", reason="test") == 1
    )
    redriving.redrive_all(USING, dead, actor="test", limit=3)
    publish("t", "erased", key="erased")
    with as_role("subscriber"):
        sequence()
    publish("t", "erased later", key="erased", delay=900)
    assert operations.erase("t", "erased", using=USING, actor="test").changed == 2
    with as_role("reader"):
        scheduled = timetable.first_scheduled(USING, topic="t", task=None, limit=50)
        first = scheduled[0]
        timetable.list_scheduled(using=USING, after=(first.deliver_at, -first.priority, first.outbox_id))
        ids = [one.outbox_id for one in scheduled]
        assert timetable.topics_of(session, ids) == {"t"}
        assert "t" in dict(timetable.topics(session))
        assert list_scheduled(topic="t", limit=2).after
        assert list_scheduled(limit=2).after
        assert not list_scheduled(topic=job_worlds.JOBS.topic, task="none").rows
    assert scheduling.count_scheduled(session, ids) == len(timetable.contents(session, ids)) == len(ids)
    with as_role("scheduler"):
        assert scheduling.reschedule(scheduled[3].message_id, topic="t", key="k1", delay=900) == 1
        assert scheduling.cancel(scheduled[4].message_id, topic="t") == 1
    del ids[4]
    assert "nope" not in log.known(session)
    assert change_rows(USING, ids[:1], CANCEL, actor="test") == 1
    assert change_rows(USING, ids[1:2], session.now() + 10**6, actor="test") == 1
    assert change_rows(USING, ids[2:], NOW, actor="test") == len(ids) - 2
    assert sequencing.idle_for(session) >= 0
    with as_role("subscriber"):
        assert sequencing.identify(USING)
        rollups.add(USING, {ref: rollups.Tally(failed=1)})
    rollups.since(session, rollups.MINUTE, session.now() - 3_600_000)
    now = session.now()
    rollups.sums(session, rollups.MINUTE, now - 3_600_000)
    rollups.sums(session, rollups.MINUTE, now - 3_600_000, length=300, by_group=True)
    rollups.of_groups(session, rollups.MINUTE, now - 3_600_000, [ref], now=now)
    _look(session, ref, places)
    _look_at_operations(session, ref)
    with as_role("subscriber"):
        for collect in (delivery_events.collect, rollups.collect, audit.collect, sequencing.collect_marks):
            collect(USING)


@as_role("operator")
def _register(ref: GroupRef, column: str, options: Any) -> None:
    """Who runs ``migrate`` registers the options of handlers."""
    groups.register_options(USING, ref, column, options, actor="migrate")


@as_role("subscriber")
def _fail(ref: GroupRef, mode: str = "ordered") -> Sub:
    """Messages of which the group has failed some, and claimed others."""
    publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(60)))
    publish_many("t", (Message(number, key="k1", delay=1000) for number in range(5)))
    held = Sub(handler(group=ref.group, mode=mode, function=lambda delivery: delivery.nack(delay=3600))).step()
    held.work(30)
    held.flush()
    return held


@as_role("operator")
def _administer(ref: GroupRef) -> None:
    """What operators do that reads or changes all there is."""
    session = Session(USING)
    held = _fail(ref)
    with as_role("scheduler"):
        publish_many("t", (Message(number, id=f"d{number}", coalesce=f"c{number}", delay=60) for number in range(2)))
    assert operations.reschedule("t", ["d0"], None, actor="test").changed == 1
    assert operations.cancel("t", ["d1"], actor="test").changed == 1
    assert operations.pause(*ref, actor="test", dry_run=True).planned
    assert operations.redrive("t", actor="test", limit=2, dry_run=True).planned == 2
    letter = QueueMessage.objects.filter(topic="t_dlq").latest("offset")
    assert operations.redrive("t", ids=[letter.original_id], group=letter.failed_group, actor="test", dry_run=True)
    with pytest.raises(OperationRefused):
        operations.redrive("t", group="nobody", actor="test")
    assert operations.edit("t", "new", offset=letter.offset, actor="test", dry_run=True).planned
    waiting = DeliveryState.objects.filter(consumer_group=ref.group, retry_count=1)
    failed = QueueMessage.objects.get(offset=waiting.values_list("message_offset", flat=True)[0])
    assert operations.retry(*ref, ids=[failed.message_id], actor="test", dry_run=True).planned == 1
    assert heartbeats.count_lost(session, "nobody", 30_000) == 0
    assert list(pruning.prune(USING, dry_run=True))
    assert sequencing.count_due(session) == 1
    assert steps._locked_text(session, ref, 1)
    run(USING, lambda session: seeking._begin(session, ref, Position(0), "", actor="test"))  # It is interrupted.
    CoalesceKey.objects.create(
        consumer_group=ref.group, topic=ref.topic, partition_key="k1", coalesce_key="c", message_offset=0
    )
    Slots.objects.create(consumer_group=ref.group, topic=ref.topic, limit_key="k1", subscriber_name="s", full_at=0)
    with as_role("subscriber"):
        heartbeats.deregister(USING, held.name, [ref])
    assert operations.drop_group(*ref, actor="test").changed


@as_role("reader")
def _glance(session: Session, ref: GroupRef) -> None:
    """Everything that people see at a glance, with a backlog."""
    with as_role("subscriber"):
        publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(60)))
        publish("unread", 1)
        sequence()
    Reader.objects.create(name="lake", read_offset=0)
    found = get_overview(using=USING)
    assert found.lag.value > 60
    with as_role("operator"):
        assert operations.drop_reader("lake", actor="test").changed
    assert not get_overview(using=USING, bounds=Bounds(partitions=2)).lag.exact  # of tens of thousands
    seen = find_problems(found)
    assert "unread" in {one.topic for one in seen}
    subscriber_problems._with_leases(Session(USING), ["gone", "vanished"])
    group = group_of(*ref, using=USING)
    assert group is not None
    beginnings.of_groups(session, [dataclasses.replace(group, paused=True, subscribers=())])
    beginnings.of_groups(session, [dataclasses.replace(group, ref=GroupRef("none", "t"), subscribers=())])
    rule = beginnings.Rule(0.5, 10)
    beginnings.of_failures(session, [ref], found.now, rule, most=10, window=600)
    beginnings.of_messages(session, {Failed(ref, head.offset): 0 for head in group.heads})
    always_failing.find_keys(session, {ref: 0}, least=1, recent=0, acked={})
    few = [head.offset for head in group.heads[:2]]
    always_failing.failed_at(session, ref, few)
    recorded = always_failing.recorded_deliveries(session, [ref], 100)[ref]
    always_failing._succeeded_at(session, ref, [head.key for head in group.heads], recorded)
    newest = list_messages(topic="t", using=USING, limit=10).entries
    assert log.publisher_keys(session, {one.offset: "__p:1" for one in newest})
    assert partitions.at(session, group, [head.key for head in group.heads])
    with_threads = SubscriberStatus(group.ref, "s", 0, 0, {"threads": 2}, live=True)
    assert subscribers.read_busy(session, ref, [with_threads]) is not None
    with override_settings(MYSQLQUEUE={"RECORD_DELIVERIES": "all"}):
        subscribers.mean_handler_ms(session, ref, session.now())
    listing = list_partitions(group=ref.group, topic=ref.topic, using=USING, limit=10)
    assert listing.after is not None
    assert list_partitions(group=ref.group, topic=ref.topic, using=USING, prefix="k", limit=10).partitions
    assert list_partitions(using=USING, prefix="k", after=listing.after, limit=10).partitions
    few = Bounds(surveyed_partitions=2, depth=1)  # of tens of thousands
    for given in ({}, {"bounds": few}, {"bounds": few, "prefix": "k"}):
        backlogs = backlogs_of(*ref, using=USING, **given)
        assert backlogs is not None
        assert not (backlogs.whole and given)
        assert "k1" in backlogs.furthest
    for subscriber in (None, "nobody"):
        partitions.in_flight(session, ref, subscriber=subscriber)
    for owner in (None, "", "nobody"):
        list_partitions(using=USING, owner=owner)
        list_partitions(using=USING, owner=owner, prefix="k", after=(*ref, "k1"))
    partitions.shares(session)
    assert ref in groups.registered_refs(USING)


@as_role("reader")
def _look(session: Session, ref: GroupRef, letters: list[int]) -> None:
    """Everything that people look at in the log."""
    listing = list_messages(using=USING, limit=10)
    for place in ({"before": listing.older}, {"after": listing.older}):
        for what in ({}, {"topic": "t"}, {"topic": "t", "key": "k1"}):
            found = list_messages(using=USING, limit=10, **what, **place)
            assert found.entries or "after" in place
    few = Bounds(merged_partitions=2)  # as if there were thousands of partitions
    for place in ({"before": listing.older}, {"after": listing.older}):
        assert list_messages(using=USING, topic="t", limit=10, bounds=few, **place).entries
    entry = list_messages(using=USING, topic="t", key="k1", limit=1).entries[0]
    for what in ({}, {"topic": "t"}, {"topic": "t", "key": "k1"}, {"topic": "t_dlq"}):
        found = log_entries.by_id(session, entry.message_id, **what)
        assert [one.offset for one in found.entries] == ([] if what.get("topic") == "t_dlq" else [entry.offset])
    log_entries.by_id(session, new_message_id())
    assert log_entries.beginnings(session, [entry.offset], 10)
    assert log_entries.search(session, "none has it", topic="t", key="k1").searched
    content = message_history.content(session, entry.offset, most=100)
    assert content is not None
    states = message_history.states(session, content)
    assert states
    live = {"s": SubscriberStatus(ref, "s", 0, 0, {}, live=True)}
    waits = dataclasses.replace(states[0], standing="unclaimed", mode="ordered", paused=False, unfinished="")
    assert reasons.why(session, content, waits, live, session.now()) is not None
    due = dataclasses.replace(waits, standing="waits")
    assert reasons.why(session, content, due, live, session.now()) is not None
    due = dataclasses.replace(due, mode="shared")
    keyed = dataclasses.replace(content, stored_coalesce_key="c")
    held = DeliveryState.objects.create(
        consumer_group=due.ref.group,
        topic=due.ref.topic,
        partition_key=entry.key,
        message_offset=0,
        delivery_token=1,
        delivered_by="s",
        invisible_until=2**50,
    )
    with as_role("subscriber"):
        coalescing.note(session, [(*due.ref, entry.key, "c", 0, 0)])
    found_reason = reasons.why(session, keyed, due, live, session.now())
    assert found_reason is not None
    assert found_reason.kind == "coalesced"
    held.delete()
    limited.read_reached(session, ref, DeliveryLimits(rate_per_key=Rate(1, "s")), ":k1", session.now(), live)
    message_history.made_of(session, message_history.recorded(session, letters[0])[0])
    message_history.successors(session, ref, entry.key, entry.offset, content)


@as_role("operator")
def _look_at_operations(session: Session, ref: GroupRef) -> None:
    """The audit log, and who has paused a group."""
    pausing.set_paused(USING, ref, actor="test", paused=True)
    paused = operations_log.pauses_of(session, {ref: 0}).get(ref)
    assert paused is not None
    audit.touch(session, paused.id)
    with as_role("reader"):
        for state in ("running", "interrupted", "ended", None):
            wanted = OperationFilter(topics=["t", "t_dlq"], actor="test", state=state)
            operations_log.look(session, wanted, before=paused.id, limit=3)
        assert operations_log.look(session, OperationFilter(), limit=3).before
        for topics in (None, ["t", "t_dlq"]):
            assert operations_log.count_unfinished(session, topics).interrupted == 0
    pausing.set_paused(USING, ref, actor="test", paused=False)


def _life(*subs: Sub) -> None:
    for sub in subs:
        sub.settle(rounds=ROUNDS)
        assert not any(work.health.failures.count for work in sub.poller.groups)
    # What comes round: ticks, extensions, the scan for work, the sweep, GC.
    publish_many("t", (Message(number, key=f"k{number % KEYS}") for number in range(100)))
    for sub in subs:
        sub.step()
        for work in sub.poller.groups:
            work.turn()
            work.reset()
        sub.poller.look_now()
        sub.heart.in_doubt = True
        sub.step()
        sub.poller.maintenance.reset()
        for _ in sub.poller.maintenance.round():
            pass
        sub.work(50)
        for work in sub.poller.groups:
            watermarks.pass_rows(USING, work.ref, {f"k{number}" for number in range(KEYS)})
    assert payloads.deleted(USING, [1, 10**15]) >= {10**15}
    for sub in subs:
        sub.settle(rounds=ROUNDS)
        sub.leave()


def _lose_and_take_over(group: str) -> None:
    """A subscriber vanishes with what it holds; another one finds the suspects and records their starts."""
    mode = "ordered" if group == "o" else "shared"
    shared = [GroupRef(group, "t")] if mode == "shared" else []
    one = handler(group=group, mode=mode, visibility_timeout=0.001)
    publish_many("t", (Message(1, key=f"k{number % KEYS}") for number in range(40)))
    lost = Sub(one, name="lost").step()
    ref = GroupRef(group, "t")
    held = lost.inbox.held(ref) if mode == "shared" else [item.claimed for item in iter(lost.take, None)]
    assert held
    token = held[0].token
    first = held[0]
    settling.extend(USING, first, milliseconds=1, shared=mode == "shared")
    settling.extend_all(USING, ref, held, milliseconds=1)
    with transaction.atomic():
        settling.ack_here(USING, first)
        transaction.set_rollback(True)
    settling.extend_all(USING, ref, held, milliseconds=600_000)
    if (waits := [one for one in lost.inbox.held(ref) if one not in held[:1]]) and mode == "shared":
        assert releasing.release_unstarted(USING, [ref], [(one.offset, one.token) for one in waits[:1]]) == 1
    released = releasing.release_all(USING, lost.name, [ref], shared=shared, died="SIGKILL")
    assert (released.deliveries if mode == "shared" else released.leases) > 0
    short = handler(group=group, mode=mode, backoff=Backoff(initial=0.001, jitter=0))
    again = Sub(short, name="again").step()
    assert settling.record_start(USING, again.take().claimed)
    releasing.release_all(USING, again.name, [ref], shared=shared, died="SIGKILL")
    heir = Sub(short, name="heir")
    heir.settle(rounds=100)  # suspects come one by one, and the one that was lost twice waits a moment
    # A late word, and a redelivery that is settled already.
    late = settling.flush(USING, ref, [Settlement(first, Action.ACK)], max_attempts=5, shared=mode == "shared")
    assert late.stale or first.offset <= ConsumerOffset.objects.get(pk=(*ref, first.key)).offset_acked
    if mode == "ordered":
        claimant = claimant_of(ref, heir.name, 5, None)
        wants = [Want("k0", due=(first.offset,))]
        request = claiming.ClaimRequest(claimant, wants, token=claiming.new_token())
        assert Left.SETTLED in claiming.claim(USING, request).left.values()
    heir.leave()
    if mode == "ordered":
        heartbeats.forget(USING, lost.name, [ref])
    claiming.undo(USING, ref, token)
