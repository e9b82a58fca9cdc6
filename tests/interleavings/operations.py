"""Everything that writes, as it is done by somebody: the operands of the schedules."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings

from django_mysqlqueue import cancel, operations, publish, publish_many, reschedule
from django_mysqlqueue.exceptions import OperationRefused, StaleDelivery, SubscriberError
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.models import DeliveryState, PartitionLease, RelayWatermark, SubscriberHeartbeat
from django_mysqlqueue.operations import (
    dead_lettering,
    dropping,
    group_mode,
    jobs,
    moving,
    pausing,
    recurring,
    redriving,
    replaying,
    retrying,
    scheduled,
    seeking,
)
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.operations.replaying import Range
from django_mysqlqueue.operations.seeking import Position
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import NO_KEY, DeliveryLimits, Rate
from django_mysqlqueue.testing import _advance
from tests.app.models import Effect
from tests.crash.crashes import ALIAS, DLQ, TOPIC
from tests.crash.worlds import WHO, G, messages, overriding
from tests.interleavings.worlds import LEASE_MS, LOST, Start
from tests.support import garbage, job_worlds, schedule_worlds
from tests.support.claims import claimant_of
from tests.support.filtering import EU, US
from tests.support.harness import USING, Sub, first_place, handler
from tests.support.internals import (
    Action,
    Claimant,
    Claimed,
    DeadLetterFilter,
    Due,
    GroupRef,
    Holding,
    JobEnd,
    JobEnds,
    OptionColumns,
    Returned,
    Session,
    Settlement,
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
    leasing,
    readers,
    relaying,
    releasing,
    rollups,
    run_id,
    samples,
    schedules,
    sequencing,
    settling,
    slots,
    superseding,
    watermarks,
)

NEW = GroupRef("new", TOPIC)
D = GroupRef("d", DLQ)
"""Handles dead letters."""
KEYS = "abcde"


LATER = int(time.time() * 1000) + 3 * LEASE_MS // 2
"""A time to which retries are moved, in epoch milliseconds. It is over when healthy subscribers handle the rest."""


@dataclass
class Actor:
    """Who does an operation, and what it knows."""

    name: str
    start: Start
    offsets: dict[str, int]
    """Message → its offset."""
    tokens: dict[int, str]
    """Token of a claim → whose it is."""
    others: list[Actor] = field(default_factory=list)
    sub: Sub | None = None
    done: list[str] = field(default_factory=list)
    """What its handlers were called with."""
    token: int = 0
    """Of its last claim."""

    def new_token(self) -> int:
        self.token = claiming.new_token()
        self.tokens[self.token] = f"{self.name}{sum(one.startswith(self.name) for one in self.tokens.values()) + 1}"
        return self.token

    def outcomes(self, *ends: tuple[Any, ...]) -> list[Settlement]:
        return [Settlement(self.start.held[name], kind, *more) for name, kind, *more in ends]

    def claimant(self, who: str, mode: str = "", *, strict: bool = False, **more: Any) -> Claimant:
        visibility = LEASE_MS if (mode or self.start.mode) == "shared" else None
        on_failure = "block" if strict else "skip"
        backoff = Backoff(initial=LEASE_MS / 1000, jitter=0)
        return claimant_of(G, who, 5, visibility, on_failure=on_failure, backoff=backoff, **more)


@dataclass(frozen=True)
class Operation:
    """One thing that somebody does, and what may come of it."""

    name: str
    run: Callable[[Actor], object]
    settles: frozenset[str] = frozenset()
    """Messages of the group that it may settle without calling a handler; ``*``: any."""
    deletes: bool = False
    """It may delete messages that are not settled: a cancellation, a discard."""
    erases: frozenset[str] = frozenset()
    """Messages that it deletes wherever they are."""
    forgets: bool = False
    """It may take the group back, or away."""
    skips: bool = False
    """It may take the group forward."""
    touches_all: bool = False
    """It is not about one group: it may change rows of any."""
    filters: FilterPolicy | None = None
    """It claims under this filter, in one transaction, if the group has it."""
    changes: FilterPolicy | None = None
    """It gives the group this filter."""
    publishes: frozenset[str] = frozenset()
    """Messages that it publishes after that."""
    withdraws: str = ""
    """A debounced message that it cancels or reschedules."""
    steps: bool = False
    """It is several transactions."""
    prepare: Callable[[Actor], None] | None = None
    """Makes what it has in its memory, before each schedule."""


OPERATIONS: dict[str, Operation] = {}


def operation(
    name: str, *, settles: str = "", **options: Any
) -> Callable[[Callable[[Actor], object]], Callable[[Actor], object]]:
    """Adds one. ``settles``: names of messages, or ``*``."""

    def add(run: Callable[[Actor], object]) -> Callable[[Actor], object]:
        assert name not in OPERATIONS
        OPERATIONS[name] = Operation(name, run, frozenset(settles.split()), **options)
        return run

    return add


# -- publishers -------------------------------------------------------------------


@operation("publish")
def _(a: Actor) -> object:
    return publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)


@operation("publish a duplicate")
def _(a: Actor) -> object:
    return publish(TOPIC, "a5", key="a", id="a5", using=ALIAS)


@operation("publish_many in chunks")
def _(a: Actor) -> object:
    """(Chunks are of one row: ``exploration.exploring``.)"""
    publish_many(TOPIC, messages("a8", "b8"), using=ALIAS)
    return None


@operation("cancel in a transaction", deletes=True)
def _(a: Actor) -> object:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="no s1")
        return cancel("s1", topic=TOPIC, using=ALIAS)


@operation("publish a debounced message")
def _(a: Actor) -> object:
    return publish(TOPIC, "a10", key="a", id="a10", coalesce="a", delay=600, max_delay=900, using=ALIAS)


@operation("cancel the last debounced message", withdraws="a9")
def _(a: Actor) -> object:
    return cancel("a9", topic=TOPIC, using=ALIAS)


@operation("cancel a debounced message", withdraws="a8")
def _(a: Actor) -> object:
    return cancel("a8", topic=TOPIC, using=ALIAS)


@operation("cancel a debounced message, rolled back")
def _(a: Actor) -> object:
    with transaction.atomic(ALIAS):
        cancelled = cancel("a8", topic=TOPIC, using=ALIAS)
        transaction.set_rollback(True, using=ALIAS)
    return cancelled


@operation("reschedule a debounced message", withdraws="a8")
def _(a: Actor) -> object:
    return reschedule("a8", topic=TOPIC, delay=86_400, using=ALIAS)


@operation("collect debounced messages")
def _(a: Actor) -> object:
    return debouncing.collect(ALIAS)[0]


@operation("reschedule")
def _(a: Actor) -> object:
    return reschedule("s1", topic=TOPIC, delay=0, using=ALIAS)


# -- the sequencer, GC ------------------------------------------------------------


@operation("sequence")
def _(a: Actor) -> object:
    return sequencing.sequence(ALIAS)


@operation("relay")
def _(a: Actor) -> object:
    """From the database to itself."""
    return relaying.relay(ALIAS, ALIAS, max_rows=2).messages


def _with_a_watermark_above_the_end(a: Actor) -> None:
    """As after a restore of the log."""
    RelayWatermark.objects.using(USING).create(target=ALIAS, relayed_offset=10**6, read_offset=10**6)


@operation("relay from a log that went back", prepare=_with_a_watermark_above_the_end)
def _(a: Actor) -> object:
    return relaying.relay(ALIAS, ALIAS, max_rows=2).repeats


@operation("note a refusal")
def _(a: Actor) -> object:
    return relaying.note_refusal(ALIAS, ALIAS, first_place(ALIAS), "an error")


@operation("divide a topic's messages")
def _(a: Actor) -> object:
    """They stay, so that the serial orders have one end."""
    moving.finish(moving.Move(TOPIC, ALIAS, USING, ALIAS, a.name))
    return moving.cut(moving.Move(TOPIC, ALIAS, USING, ALIAS, a.name)) > 0


@operation("move a topic here")
def _(a: Actor) -> object:
    """From the same database, by another connection, on which nobody waits."""
    ref = GroupRef("new", "moved")
    groups.register(USING, ref, mode="ordered", start="earliest")
    move = moving.Move("moved", ALIAS, USING, ALIAS, a.name)
    moving.prepare(move)
    moving.has_left(moving.Move("moved", USING, ALIAS, USING, a.name), 0)
    moving.cut(moving.Move("moved", ALIAS, USING, ALIAS, a.name))
    moving.hand_over(move, ref)
    return None


@operation("cancel a move")
def _(a: Actor) -> object:
    """It was prepared on the same database, by another connection, on which nobody waits."""
    ref = GroupRef("new", "moved")
    groups.register(USING, ref, mode="ordered", start="earliest")
    move = moving.Move("moved", ALIAS, USING, ALIAS, a.name)
    moving.prepare(move)
    moving.cancel(move)
    return None


# -- jobs ---------------------------------------------------------------------------


@operation("enqueue jobs")
def _(a: Actor) -> object:
    return job_worlds.enqueue(ALIAS)


@operation("enqueue a chain of jobs")
def enqueue_chain(a: Actor) -> object:
    return len(job_worlds.enqueue_chain(ALIAS))


@operation("insert results of redriven jobs")
def insert_redriven(a: Actor) -> object:
    return job_worlds.insert_redriven(ALIAS)


@operation("begin jobs")
def _(a: Actor) -> object:
    """As if another subscriber had claimed them."""
    return {name: row.status for name, row in job_results.begin(ALIAS, a.name, job_worlds.ENDS).rows.items()}


@operation("end jobs")
def _(a: Actor) -> object:
    flushed = job_worlds.flush(ALIAS, a.start.held)
    return len(flushed.stale), len(flushed.locked)


@operation("let a job wait in its task")
def wait_here(a: Actor) -> object:
    return job_worlds.wait_here(ALIAS, a.start.held, "acked", job_worlds.SHORT)


@operation("let a job wait for long in its task")
def wait_long_here(a: Actor) -> object:
    return job_worlds.wait_here(ALIAS, a.start.held, "acked", job_worlds.LONG)


@operation("flush waits of jobs")
def flush_waits(a: Actor) -> object:
    flushed = job_worlds.flush_waits(ALIAS, a.start.held)
    return len(flushed.stale), len(flushed.locked), len(flushed.moved)


@operation("end the first job of a stage")
def end_first(a: Actor) -> object:
    return _end_of(a, job_worlds.FIRST)


@operation("end the second job of a stage")
def end_second(a: Actor) -> object:
    return _end_of(a, job_worlds.SECOND)


@operation("fail the second job of a stage")
def fail_second(a: Actor) -> object:
    return _end_of(a, job_worlds.SECOND, failed=True)


def _end_of(a: Actor, name: str, *, failed: bool = False) -> object:
    flushed = job_worlds.end_of(ALIAS, a.start.held, name, failed=failed)
    return len(flushed.stale), len(flushed.locked)


@operation("store the starts of jobs")
def store_starts(a: Actor) -> object:
    started = [job_rows.StartedJob(name, 5, 6, "{}") for name in (job_worlds.FIRST, job_worlds.SECOND)]
    return groups.run(ALIAS, lambda session: job_rows.store_started(session, started))


@operation("cancel a job of the second stage")
def cancel_later(a: Actor) -> object:
    return job_worlds.request_cancel(ALIAS, job_worlds.LATER)


@operation("cancel a running job")
def cancel_running(a: Actor) -> object:
    return job_worlds.request_cancel(ALIAS, job_worlds.FIRST, job_worlds.SECOND)


@operation("cancel jobs of two stages")
def cancel_two_stages(a: Actor) -> object:
    return job_worlds.request_cancel(ALIAS, job_worlds.FIRST, job_worlds.LATER)


@operation("cancel jobs of two stages, the later first")
def cancel_two_stages_backwards(a: Actor) -> object:
    return job_worlds.request_cancel(ALIAS, job_worlds.LATER, job_worlds.SECOND)


@operation("end a job of a stage that waits")
def end_waiting(a: Actor) -> object:
    """As the handler of an atomic job does that has been started meanwhile."""
    end = JobEnd(job_worlds.SECOND, 5, 5, "2", stage=job_worlds.STAGES[0])

    def succeed(session: Session) -> int:
        try:
            job_results.succeed(session, end, StaleDelivery)
        except StaleDelivery:
            return 0
        return 1

    return groups.run(ALIAS, succeed)


@operation("fail a job of a stage that waits")
def fail_waiting(a: Actor) -> object:
    """As a claim does that passes its message."""
    reasons = {job_worlds.SECOND: ("JobExpired", "It expired.")}
    return groups.run(ALIAS, lambda session: job_results.follow(session, JobEnds(reasons=reasons)))


@operation("cancel jobs as operators do")
def _(a: Actor) -> object:
    with job_worlds.configured():
        names = [job_worlds.FIRST, job_worlds.SECOND, job_worlds.LATER]
        return jobs.cancel(ALIAS, names, actor=a.name)


@operation("cancel the jobs of a task", deletes=True)
def _(a: Actor) -> object:
    wanted = jobs.TaskJobs(job_worlds.PATH, job_worlds.JOBS.topic)
    with job_worlds.configured():
        return jobs.cancel_all(ALIAS, wanted, actor=a.name, limits=OperationLimits(jobs=2))


@operation("retry jobs that wait")
def _(a: Actor) -> object:
    return job_worlds.retry(ALIAS)


@operation("begin the jobs of a stage")
def begin_stage(a: Actor) -> object:
    return {
        name: row.status
        for name, row in job_results.begin(ALIAS, a.name, (job_worlds.FIRST, job_worlds.SECOND)).rows.items()
    }


@operation("restart the second job of a stage")
def restart_second(a: Actor) -> object:
    return job_worlds.redriven(ALIAS, a.start.held, job_worlds.SECOND)


@operation("enqueue a unique job")
def enqueue_unique(a: Actor) -> object:
    return job_worlds.enqueue_unique(ALIAS) in (job_worlds.FIRST, job_worlds.SECOND)


@operation("enqueue a job that is unique until it has ended")
def enqueue_single(a: Actor) -> object:
    return job_worlds.enqueue_unique(ALIAS, kept=True) in job_worlds.ENDS


@operation("redrive a unique job")
def redrive_unique(a: Actor) -> object:
    return job_worlds.redrive_unique(ALIAS, "dead")


@operation("end skipped jobs")
def end_skipped(a: Actor) -> object:
    return job_worlds.end_skipped(ALIAS)


@operation("cancel jobs")
def _(a: Actor) -> object:
    return groups.run(
        ALIAS, lambda session: job_results.cancel(session, dict.fromkeys(("acked", "nacked"), job_worlds.JOBS.topic))
    )


@operation("restart jobs")
def _(a: Actor) -> object:
    return job_worlds.redriven(ALIAS, a.start.held, "dead")


@operation("collect results")
def _(a: Actor) -> object:
    with override_settings(MYSQLQUEUE={"RESULTS_RETENTION": 0}):
        return job_results.collect(ALIAS)


# -- recurring schedules --------------------------------------------------------------


def changes_schedule(name: str, call: Callable[..., Any]) -> None:
    @operation(name)
    def _(a: Actor) -> object:
        with job_worlds.configured():
            return call(schedule_worlds.NAME, actor=a.name, using=ALIAS).changed


@operation("tick")
def _(a: Actor) -> object:
    done = schedule_worlds.tick(ALIAS)
    return {
        one
        for one, is_so in {
            "locked": done.row is None,
            "due": bool(done.ticks),
            "published": bool(done.published),
            "skipped": done.skipped,
        }.items()
        if is_so
    }


@operation("register the schedule with other arguments")
def _(a: Actor) -> object:
    return schedules.register(ALIAS, {schedule_worlds.NAME: schedule_worlds.daily(args=[2])})


@operation("register the schedule with other times")
def _(a: Actor) -> object:
    return schedules.register(ALIAS, {schedule_worlds.NAME: schedule_worlds.daily(days=2)})


@operation("create the schedule")
def _(a: Actor) -> object:
    with job_worlds.configured():
        try:
            recurring.create_recurring(
                schedule_worlds.NAME, job_worlds.PATH, cron="0 3 * * *", timezone="UTC", actor=a.name, using=ALIAS
            )
        except OperationRefused:
            return "refused"
    return "created"


def edits_schedule(name: str, **changes: Any) -> None:
    @operation(name)
    def _(a: Actor) -> object:
        with job_worlds.configured():
            try:
                return recurring.update_recurring(schedule_worlds.NAME, **changes, actor=a.name, using=ALIAS).changed
            except OperationRefused:
                return "refused"


edits_schedule("edit the arguments of the schedule", args=[3])
edits_schedule("edit the times of the schedule", every=2 * 86_400)
edits_schedule("disable the schedule", enabled=False)


@operation("end the schedule's last job")
def _(a: Actor) -> object:
    job = run_id(schedule_worlds.NAME, 1000)
    end = Settlement(a.start.held[job], Action.ACK, job=JobEnd(job, 5, 5, "2"))
    with job_worlds.configured():
        flushed = settling.flush(ALIAS, job_worlds.JOBS, [end], max_attempts=None, shared=True)
    return len(flushed.stale), len(flushed.locked)


@operation("note that the schedule is seen")
def _(a: Actor) -> object:
    return schedules.note_seen(ALIAS, [schedule_worlds.NAME])


@operation("end the declaration of the schedule")
def _(a: Actor) -> object:
    return schedules.note_ended(ALIAS, [schedule_worlds.NAME])


changes_schedule("run the schedule now", recurring.run_recurring)
changes_schedule("pause the schedule", recurring.pause_recurring)
changes_schedule("resume the schedule", recurring.resume_recurring)
changes_schedule("delete the schedule", recurring.delete_recurring)


@operation("sequence, later")
def _(a: Actor) -> object:
    """When the scheduled messages have come due. Only this session has the later time."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SET SESSION timestamp = UNIX_TIMESTAMP() + 2000000")
        try:
            return sequencing.sequence(ALIAS)
        finally:
            cursor.execute("SET SESSION timestamp = DEFAULT")


@operation("collect", touches_all=True)
def _(a: Actor) -> object:
    found = garbage.collect(ALIAS)
    return found.messages, found.offsets_rows


@operation("collect history")
def _(a: Actor) -> object:
    return delivery_events.collect(ALIAS), rollups.collect(ALIAS), audit.collect(ALIAS)


@operation("add to rollups")
def _(a: Actor) -> object:
    rollups.add(ALIAS, {G: rollups.Tally(failed=1)})
    return None


@operation("sample the backlog")
def _(a: Actor) -> object:
    for ref, minute in samples.claim(ALIAS, [G], {}).items():
        sample = samples.Sample(ALIAS, ref, minute)
        sample.begin()
        sample.add(["a", "b"])
        while not sample.is_counted():
            sample.count()
        sample.end()
    return None


@operation("forget old heartbeats")
def _(a: Actor) -> object:
    return heartbeats.forget_old(ALIAS)


# -- groups -----------------------------------------------------------------------


@operation("register again")
def _(a: Actor) -> object:
    return groups.register(ALIAS, G, mode="ordered", start="earliest")


@operation("register another group from the beginning")
def _(a: Actor) -> object:
    return groups.register(ALIAS, NEW, mode="ordered", start="earliest").mode


@operation("register another group from the end")
def _(a: Actor) -> object:
    return groups.register(ALIAS, NEW, mode="ordered", start="latest").mode


@operation("set_mode shared")
def _(a: Actor) -> object:
    group_mode.set_mode(ALIAS, G, "shared", lease_ms=LEASE_MS, actor=a.name)
    return None


@operation("set_mode ordered")
def _(a: Actor) -> object:
    group_mode.set_mode(ALIAS, G, "ordered", lease_ms=LEASE_MS, actor=a.name)
    return None


@operation("pause")
def _(a: Actor) -> object:
    return pausing.set_paused(ALIAS, G, actor=a.name, paused=True)


@operation("override an option")
def _(a: Actor) -> object:
    return len(overriding(ALIAS, {"prefetch": 3}, [], actor=a.name))


@operation("override another option")
def _(a: Actor) -> object:
    found = overriding(ALIAS, {"claim_size": 2}, ["prefetch"], actor=a.name)
    return len(found)


@operation("resume")
def _(a: Actor) -> object:
    return pausing.set_paused(ALIAS, G, actor=a.name, paused=False)


@operation("drop", forgets=True, steps=True)
def _(a: Actor) -> object:
    return dropping.drop(ALIAS, G, actor=a.name)


@operation("seek to the beginning", forgets=True, steps=True)
def seek_back(a: Actor) -> object:
    return seeking.move(ALIAS, G, Position(0), actor=a.name)


@operation("seek to the end", forgets=True, skips=True, steps=True)
def _(a: Actor) -> object:
    return seeking.move(ALIAS, G, seeking.position_of(ALIAS, "latest"), actor=a.name)


# -- heartbeats and leases ----------------------------------------------------------


@operation("beat")
def _(a: Actor) -> object:
    return heartbeats.beat(ALIAS, WHO, [G], {})


@operation("report a breakdown")
def _(a: Actor) -> object:
    return heartbeats.report(ALIAS, WHO, G, "KeyError: 'k'")


@operation("refuse to start")
def _(a: Actor) -> object:
    return heartbeats.refuse(ALIAS, "refuser", {"refused": a.name})


@operation("beat of a newcomer")
def _(a: Actor) -> object:
    return heartbeats.beat(ALIAS, "newcomer", [G], {})


@operation("deregister")
def _(a: Actor) -> object:
    return heartbeats.deregister(ALIAS, WHO, [G])


@operation("forget a heartbeat")
def _(a: Actor) -> object:
    return heartbeats.forget(ALIAS, WHO, [G])


@operation("remove a lost subscriber")
def _(a: Actor) -> object:
    return heartbeats.remove(ALIAS, LOST, actor=a.name, lease_ms=LEASE_MS)


@operation("remove the subscriber")
def _(a: Actor) -> object:
    return heartbeats.remove(ALIAS, WHO, actor=a.name, lease_ms=LEASE_MS)


@operation("verify leases")
def _(a: Actor) -> object:
    return leasing.verify_owned(ALIAS, G, WHO, KEYS)


@operation("release leases")
def _(a: Actor) -> object:
    return leasing.release(ALIAS, G, WHO, KEYS)


@operation("revoke leases")
def _(a: Actor) -> object:
    return leasing.revoke(ALIAS, G, list(KEYS), actor=a.name)


@operation("drop drained leases")
def _(a: Actor) -> object:
    return leasing.drop_drained(ALIAS, G, WHO, KEYS)


def _without_heartbeats(a: Actor) -> None:
    """The owner has had none for so long that GC has deleted it."""
    SubscriberHeartbeat.objects.using(USING).filter(consumer_group=G.group, subscriber_name=WHO).delete()
    PartitionLease.objects.using(USING).filter(consumer_group=G.group).update(leased_at=1)


@operation("collect leases", prepare=_without_heartbeats)
def _(a: Actor) -> object:
    return leasing.collect(ALIAS)[0]


@operation("release everything")
def _(a: Actor) -> object:
    return releasing.release_all(ALIAS, WHO, [G], shared=[G] if a.start.mode == "shared" else [])


@operation("release everything of a dead process")
def _(a: Actor) -> object:
    shared = [G] if a.start.mode == "shared" else []
    return releasing.release_all(ALIAS, WHO, [G], shared=shared, died="SIGKILL")


@operation("release what has not started")
def _(a: Actor) -> object:
    left = [(one.offset, one.token) for one in a.start.held.values()]
    return releasing.release_unstarted(ALIAS, [G], left)


@operation("release what is cut off")
def _(a: Actor) -> object:
    ends = [Settlement(one, Action.RELEASE) for one in a.start.held.values()]
    return releasing.release_unfinished(ALIAS, G, ends, max_attempts=5)


def take_over(a: Actor, who: str) -> object:
    """Leases, then all that was claimed under them."""
    got = leasing.acquire(ALIAS, G, who, KEYS, lease_ms=LEASE_MS)
    held = sorted(got.held)
    if not held:
        return got
    watermarks.create_missing(ALIAS, G, held)
    found = leasing.load(Session(ALIAS), G, held)
    wants = [Want(key, tuple(one.offset for one in found if (one.key, one.due) == (key, 0)), 10) for key in held]
    return got, claiming.claim(ALIAS, claiming.ClaimRequest(a.claimant(who, "ordered"), wants, token=a.new_token()))


@operation("take over", steps=True)
def _(a: Actor) -> object:
    return take_over(a, "thief")


@operation("join", steps=True)
def join(a: Actor) -> object:
    """How a subscriber starts; one for each actor."""
    who = f"newcomer{a.name}"
    if groups.register(ALIAS, G, mode="ordered", start="earliest").mode != "ordered":
        raise SubscriberError("registered with another mode")
    heartbeats.beat(ALIAS, who, [G], {})
    return take_over(a, who)


# -- claims -------------------------------------------------------------------------


@operation("claim")
def claim(a: Actor) -> object:
    wants = [Want(key, look_at=10) for key in "ab"]
    return claiming.claim(ALIAS, claiming.ClaimRequest(a.claimant(WHO), wants, token=a.new_token()))


@operation("claim and flush", settles="a1")
def _(a: Actor) -> object:
    ends = a.outcomes(("a1", Action.ACK), ("a3", Action.NACK, LEASE_MS, "no"))
    return claiming.claim(
        ALIAS,
        claiming.ClaimRequest(
            a.claimant(WHO), [Want(key, look_at=10) for key in "ab"], token=a.new_token(), settlements=ends
        ),
    )


@operation("claim again")
def _(a: Actor) -> object:
    """Ordered: what it believes due of its partitions."""
    due = {"a": ("a1", "a2", "a3"), "b": ("b1",)}
    wants = [Want(key, tuple(a.offsets[name] for name in names), 10) for key, names in due.items()]
    return claiming.claim(ALIAS, claiming.ClaimRequest(a.claimant(WHO), wants, token=a.new_token()))


@operation("claim, strict")
def _(a: Actor) -> object:
    """As for ``on_failure="block"``."""
    wants = [Want(key, look_at=10) for key in "ab"]
    return claiming.claim(ALIAS, claiming.ClaimRequest(a.claimant(WHO, strict=True), wants, token=a.new_token()))


@operation("claim of dead letters")
def _(a: Actor) -> object:
    """By a consumer group on the DLQ topic."""
    return claiming.claim(
        ALIAS,
        claiming.ClaimRequest(
            claimant_of(D, WHO, 5, None), [Want(key, look_at=10) for key in "ab"], token=a.new_token()
        ),
    )


@operation("claim, shared")
def _(a: Actor) -> object:
    """Of one more subscriber for each actor."""
    wants = [Want(key, look_at=10) for key in "ab"]
    return claiming.claim(
        ALIAS, claiming.ClaimRequest(a.claimant(f"sub{a.name}"), wants, token=a.new_token(), due=Due(10))
    )


@operation("claim and flush, shared", settles="a1")
def _(a: Actor) -> object:
    ends = a.outcomes(("a1", Action.ACK), ("a3", Action.NACK, LEASE_MS, "no"))
    wants = [Want(key, look_at=10) for key in "ab"]
    return claiming.claim(
        ALIAS, claiming.ClaimRequest(a.claimant(WHO), wants, token=a.new_token(), settlements=ends, due=Due(10))
    )


LIMITS = DeliveryLimits(rate_per_key=Rate(1, "h"), max_in_flight=3, limit_by="tenant")
"""Messages of the tenant x have no slot: see ``worlds.limit``."""


@operation("claim with limits, shared", steps=True)
def _(a: Actor) -> object:
    """Of one more subscriber for each actor."""
    who = f"sub{a.name}"
    heartbeats.beat(ALIAS, who, [G], {})
    sequencing.sequence(ALIAS)
    wants = [Want(key, look_at=10) for key in "ab"]
    holding = Holding(who, LIMITS, LEASE_MS)
    request = claiming.ClaimRequest(a.claimant(who), wants, token=a.new_token(), due=Due(10), holding=holding)
    return claiming.claim(ALIAS, request)


@operation("flush and release slots", settles="a1")
def _(a: Actor) -> object:
    back = {NO_KEY: Returned(1, 1), ":x": Returned(1, 1)}
    return settling.flush(
        ALIAS,
        G,
        a.outcomes(("a1", Action.ACK)),
        max_attempts=5,
        shared=a.start.mode == "shared",
        holding=Holding(WHO, LIMITS, LEASE_MS, {NO_KEY: 1}, {NO_KEY: 2}, (), back),
    )


@operation("collect slots")
def _(a: Actor) -> object:
    return slots.collect(ALIAS)


@operation("register limits")
def _(a: Actor) -> object:
    return groups.register_options(ALIAS, G, "limits", {"rate": "9000/s"}, actor=a.name)


def _claim_under(a: Actor, policy: FilterPolicy, settlements: Sequence[Settlement] = ()) -> object:
    """By a process that knows a filter, which need not be that of the group any more, or yet."""
    is_shared = a.start.mode == "shared"
    who = f"sub{a.name}" if is_shared else WHO
    options = a.start.options if policy == EU else OptionColumns(filter=json.dumps(policy.as_json()))
    claimant = a.claimant(who, filter=policy, options=options)
    wants = [Want(key, look_at=1) for key in "ab"]
    due = Due(10) if is_shared else None
    request = claiming.ClaimRequest(claimant, wants, token=a.new_token(), settlements=settlements, due=due)
    return claiming.claim(ALIAS, request)


@operation("claim that passes what has expired")
def _(a: Actor) -> object:
    is_shared = a.start.mode == "shared"
    wants = [Want(key, look_at=1) for key in "ab"]
    who = f"sub{a.name}" if is_shared else WHO
    request = claiming.ClaimRequest(
        a.claimant(who), wants, token=a.new_token(), due=Due(10) if is_shared else None, passes=True
    )
    return claiming.claim(ALIAS, request)


@operation("claim that passes what is superseded")
def _(a: Actor) -> object:
    is_shared = a.start.mode == "shared"
    due = () if is_shared else a.start.failed
    wants = [Want("a", look_at=2), Want("b", due=due, look_at=2)]
    who = f"sub{a.name}" if is_shared else WHO
    request = claiming.ClaimRequest(
        a.claimant(who), wants, token=a.new_token(), due=Due(10) if is_shared else None, passes=True
    )
    return claiming.claim(ALIAS, request)


@operation("redeliver, shared")
def _(a: Actor) -> object:
    """A claim that looks at no partition."""
    request = claiming.ClaimRequest(a.claimant(f"sub{a.name}"), (), token=a.new_token(), due=Due(10), passes=True)
    return claiming.claim(ALIAS, request)


@operation("collect coalesce keys")
def _(a: Actor) -> object:
    return coalescing.collect(ALIAS)[0]


@operation("claim with a filter", filters=EU)
def _(a: Actor) -> object:
    return _claim_under(a, EU)


@operation("claim with another filter", filters=US)
def _(a: Actor) -> object:
    return _claim_under(a, US)


@operation("claim with a filter and flush", filters=EU, settles="a1")
def _(a: Actor) -> object:
    return _claim_under(a, EU, a.outcomes(("a1", Action.ACK), ("a3", Action.NACK, LEASE_MS, "no")))


def _claim_to_supersede(a: Actor, policy: FilterPolicy) -> object:
    """It gives up a4 and b1, and leaves those above the position that supersede them."""
    is_shared = a.start.mode == "shared"
    options = a.start.options if policy == EU else OptionColumns(filter=json.dumps(policy.as_json()))
    claimant = a.claimant(f"sub{a.name}" if is_shared else WHO, filter=policy, options=options)
    wants = [Want("a", look_at=1), Want("b", due=() if is_shared else a.start.failed, look_at=1)]
    request = claiming.ClaimRequest(
        claimant, wants, token=a.new_token(), due=Due(10) if is_shared else None, passes=True
    )
    return claiming.claim(ALIAS, request)


@operation("claim that supersedes, with a filter", filters=EU)
def _(a: Actor) -> object:
    return _claim_to_supersede(a, EU)


@operation("claim that supersedes, with another filter", filters=US)
def _(a: Actor) -> object:
    return _claim_to_supersede(a, US)


@operation("give up what is superseded at its start", steps=True)
def _(a: Actor) -> object:
    """a1, by a7: its process asks before it calls the handler, and settles it with its next flush."""
    held = a.start.held["a1"]

    def filter_of(columns: OptionColumns) -> FilterPolicy:
        return EU if columns == a.start.options else US

    if not superseding.give_up(ALIAS, G, filter_of, {(held.key, held.offset): "x"}):
        return False
    is_shared = a.start.mode == "shared"
    settling.flush(ALIAS, G, [Settlement(held, Action.SUPERSEDED)], max_attempts=5, shared=is_shared)
    return True


def register_filter(a: Actor) -> object:
    return groups.register_options(ALIAS, G, "filter", US.as_json(), actor=a.name)


operation("register another filter", changes=US)(register_filter)


@operation("register another filter and publish", changes=US, publishes=frozenset({"a9", "b9"}), steps=True)
def _(a: Actor) -> object:
    """What is published then is never passed under the filter before."""
    done = register_filter(a)
    for name in ("a9", "b9"):
        publish(TOPIC, name, key=name[0], id=name, metadata={"region": "us"}, using=ALIAS)
    return done, sequencing.sequence(ALIAS)


@operation("override the filter", changes=US)
def _(a: Actor) -> object:
    return len(overriding(ALIAS, {"filter": US}, [], actor=a.name))


@operation("undo")
def _(a: Actor) -> object:
    return claiming.undo(ALIAS, G, a.start.held["a1"].token)


def undo_others(a: Actor) -> object:
    """Gives back what the first actor's claim may have taken."""
    return claiming.undo(ALIAS, G, a.others[0].token)


UNDO_OTHERS = Operation("undo the claim", undo_others)


# -- ends -----------------------------------------------------------------------------


def _flush(a: Actor, *ends: tuple[Any, ...]) -> object:
    return settling.flush(ALIAS, G, a.outcomes(*ends), max_attempts=5, shared=a.start.mode == "shared", also="abc")


@operation("flush acks", settles="a1 a3")
def _(a: Actor) -> object:
    return _flush(a, ("a1", Action.ACK), ("a3", Action.ACK))


@operation("flush failures", settles="a1")
def _(a: Actor) -> object:
    return _flush(a, ("a1", Action.REJECT, 0, "no"), ("a3", Action.NACK, LEASE_MS, "no"))


@operation("flush a last failure", settles="a3")
def _(a: Actor) -> object:
    a3 = a.start.held["a3"]
    ends = [
        *a.outcomes(("a1", Action.SNOOZE, LEASE_MS)),
        Settlement(a3._replace(attempt=5), Action.NACK, LEASE_MS, "no"),
    ]
    return settling.flush(ALIAS, G, ends, max_attempts=5, shared=a.start.mode == "shared", also="abc")


@operation("flush a deleted message", settles="a1")
def _(a: Actor) -> object:
    return _flush(a, ("a1", Action.DELETED), ("a3", Action.SNOOZE, LEASE_MS))


@operation("flush acks of dead letters")
def _(a: Actor) -> object:
    ends = [Settlement(one, Action.ACK) for one in a.start.held.values()]
    return settling.flush(ALIAS, D, ends, max_attempts=5, shared=False, also="ab")


@operation("reject dead letters")
def _(a: Actor) -> object:
    """There is nowhere else for them to go: they wait for another attempt."""
    ends = [Settlement(one, Action.REJECT, LEASE_MS, "no") for one in a.start.held.values()]
    return settling.flush(ALIAS, D, ends, max_attempts=5, shared=False, also="ab")


@operation("flush an ack behind a failure", settles="a3")
def _(a: Actor) -> object:
    return _flush(a, ("a1", Action.RELEASE), ("a3", Action.ACK))


def _unsettled(a: Actor) -> list[Claimed]:
    """All that anybody has claimed of the group, with its token."""
    rows = DeliveryState.objects.using(ALIAS).filter(consumer_group=G.group, topic=G.topic, acked=False)
    places = rows.exclude(delivery_token=0).values_list("partition_key", "message_offset", "delivery_token")
    return [Claimed(G, key, at, token, 1, suspect=False, size=0) for key, at, token in places.order_by("pk")]


@operation("ack everything", settles="*")
def _(a: Actor) -> object:
    ends = [Settlement(one, Action.ACK) for one in _unsettled(a)]
    return settling.flush(ALIAS, G, ends, max_attempts=5, shared=False)


@operation("fail everything")
def _(a: Actor) -> object:
    ends = [Settlement(one, Action.NACK, LEASE_MS, "no") for one in _unsettled(a)]
    return settling.flush(ALIAS, G, ends, max_attempts=5, shared=False)


@operation("sweep")
def _(a: Actor) -> object:
    return watermarks.sweep(ALIAS, G, KEYS)


@operation("pass rows")
def _(a: Actor) -> object:
    """After a claim that met rows above the position."""
    return watermarks.pass_rows(ALIAS, G, KEYS)


@operation("create offsets rows")
def _(a: Actor) -> object:
    return watermarks.create_missing(ALIAS, G, KEYS)


@operation("ack in a transaction", settles="a1")
def _(a: Actor) -> object:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="a1")
        settling.ack_here(ALIAS, a.start.held["a1"])
    return None


@operation("settle in a transaction", settles="a1 a3")
def _(a: Actor) -> object:
    held = a.start.held
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="a3")
        stale = settling.settle_here(ALIAS, [held["a3"]], [(held["a1"], "no")])
        if stale:
            transaction.set_rollback(True, using=ALIAS)
    return stale


@operation("record a start")
def _(a: Actor) -> object:
    return settling.record_start(ALIAS, a.start.held["a1"])


@operation("extend")
def _(a: Actor) -> object:
    return settling.extend(ALIAS, a.start.held["a1"], milliseconds=LEASE_MS, shared=True)


@operation("extend all")
def _(a: Actor) -> object:
    held = [a.start.held[name] for name in ("a1", "a3")]
    lost = settling.extend_all(ALIAS, G, held, milliseconds=LEASE_MS)
    return sorted(offset for _, offset, _ in lost)


# -- operators ------------------------------------------------------------------------


@operation("retry", steps=True)
def _(a: Actor) -> object:
    return retrying.make_due(ALIAS, G, actor=a.name, reset_attempts=True)


@operation("retry one", steps=True)
def _(a: Actor) -> object:
    return retrying.make_due(ALIAS, G, actor=a.name, rows=[("b", a.offsets["b1"])])


@operation("retry later", steps=True)
def _(a: Actor) -> object:
    """Those with the error: b1 has it at the start."""
    return retrying.make_due(ALIAS, G, actor=a.name, error="no", due=LATER, reset_attempts=True)


@operation("dead-letter now", settles="b1 e1")
def _(a: Actor) -> object:
    return dead_lettering.dead_letter_now(ALIAS, G, [a.offsets["b1"], a.offsets["e1"]], actor=a.name)


@operation("redrive", steps=True)
def redrive(a: Actor) -> object:
    return redriving.redrive_all(ALIAS, DeadLetterFilter(DLQ), actor=a.name)


@operation("redrive one", steps=True)
def _(a: Actor) -> object:
    return redriving.redrive_all(ALIAS, DeadLetterFilter(DLQ), actor=a.name, limit=1)


@operation("replay a range", steps=True)
def _(a: Actor) -> object:
    first, last = a.offsets["a1"], a.offsets["a3"]
    wanted = Range(G, first, last, "r")
    return replaying.publish_copies(
        ALIAS, wanted, upto=last, actor=a.name, limits=OperationLimits(dead_letters=2)
    ).replayed


@operation("publish a test message")
def _(a: Actor) -> object:
    return operations.publish(TOPIC, "a9", id="a9", key="a", using=ALIAS, actor=a.name).changed


@operation("discard", steps=True)
def _(a: Actor) -> object:
    return redriving.discard_all(ALIAS, DeadLetterFilter(DLQ), actor=a.name, reason="none")


@operation("erase", steps=True, touches_all=True, erases=frozenset({"b1", "b2", "b7", "b8"}), settles="b1 b2 b7 b8")
def _(a: Actor) -> object:
    return operations.erase(TOPIC, "b", actor=a.name, using=ALIAS).changed


@operation("drop the reader")
def _(a: Actor) -> object:
    return readers.drop(ALIAS, "lake", actor=a.name)


@operation("replace")
def _(a: Actor) -> object:
    offset = min((at for name, at in a.offsets.items() if name.endswith("!")), default=0)
    redriving.replace(ALIAS, DLQ, offset, "corrected", actor=a.name)
    return None


@operation("cancel scheduled", deletes=True)
def _(a: Actor) -> object:
    return scheduled.change_rows(ALIAS, a.start.scheduled, scheduled.CANCEL, actor=a.name)


@operation("deliver scheduled now")
def _(a: Actor) -> object:
    return scheduled.change_rows(ALIAS, a.start.scheduled, scheduled.NOW, actor=a.name)


@operation("move scheduled")
def _(a: Actor) -> object:
    return scheduled.change_rows(ALIAS, a.start.scheduled, 4 * 10**12, actor=a.name)


@operation("bring everything nearer", touches_all=True)
def _(a: Actor) -> object:
    return _advance(ALIAS, 60_000)


@operation("requeue")
def _(a: Actor) -> object:
    return operations.requeue_quarantined(a.start.quarantined, actor=a.name, using=ALIAS).changed


@operation("delete quarantined")
def _(a: Actor) -> object:
    return operations.delete_quarantined(a.start.quarantined, actor=a.name, using=ALIAS).changed


# -- whole subscribers, whole commands ---------------------------------------------------


def _subscriber(mode: str, **options: Any) -> Callable[[Actor], None]:
    options |= {"mode": mode, "visibility_timeout": LEASE_MS / 1000}

    def prepare(a: Actor) -> None:
        act = handler(TOPIC, "g", lambda delivery: a.done.append(delivery.payload), **options)
        a.sub = Sub(act, name=f"sub{a.name}")
        a.sub.use(ALIAS)

    return prepare


def _turn(a: Actor) -> object:
    assert a.sub is not None
    a.sub.step()
    a.sub.work()
    a.sub.flush()
    return sorted(a.done)


for _mode in ("ordered", "shared"):
    OPERATIONS[f"a turn, {_mode}"] = Operation(f"a turn, {_mode}", _turn, steps=True, prepare=_subscriber(_mode))
    OPERATIONS[f"an atomic turn, {_mode}"] = Operation(
        f"an atomic turn, {_mode}", _turn, steps=True, prepare=_subscriber(_mode, atomic=True)
    )


def command(name: str, *arguments: str, **options: Any) -> None:
    def run(a: Actor) -> object:
        call_command(name, *arguments, database=ALIAS, stdout=io.StringIO(), stderr=io.StringIO())
        return None

    title = " ".join((name, *arguments))
    OPERATIONS[title] = Operation(title, run, steps=True, **options)


command("queuepause", "g", TOPIC, "--noinput")
command("queueresume", "g", TOPIC, "--noinput")
command("queuegroupmode", "g", TOPIC, "shared", "--noinput")
command("queuecancel", TOPIC, "s1", "--noinput", deletes=True)
command("queuediscard", TOPIC, "--reason", "none", "--noinput")
command("queuegc", touches_all=True)
command("queueseek", "g", TOPIC, "earliest", "--noinput", forgets=True)
command("queuedropgroup", "g", TOPIC, "--noinput", forgets=True)
command("queueretry", "g", TOPIC, "--noinput")
command("queueredrive", TOPIC, "--noinput")
command("queuesequence")


def both(first: str, *others: Callable[[Actor], object] | str) -> Operation:
    """One after the other, by the same actor."""
    parts = [OPERATIONS[one] if isinstance(one, str) else Operation(one.__name__, one) for one in (first, *others)]

    def run(a: Actor) -> object:
        return [part.run(a) for part in parts]

    def prepare(a: Actor) -> None:
        for part in parts:
            if part.prepare is not None:
                part.prepare(a)

    return Operation(
        ", ".join(part.name for part in parts),
        run,
        frozenset().union(*(part.settles for part in parts)),
        deletes=any(part.deletes for part in parts),
        erases=frozenset().union(*(part.erases for part in parts)),
        forgets=any(part.forgets for part in parts),
        skips=any(part.skips for part in parts),
        touches_all=any(part.touches_all for part in parts),
        changes=next((part.changes for part in parts if part.changes is not None), None),
        publishes=frozenset().union(*(part.publishes for part in parts)),
        withdraws=next((part.withdraws for part in parts if part.withdraws), ""),
        steps=True,
        prepare=prepare if any(part.prepare is not None for part in parts) else None,
    )


def of(names: Sequence[str]) -> list[Operation]:
    return [OPERATIONS[name] for name in names]
