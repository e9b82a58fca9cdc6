"""What operators do that the crash tests end at every statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django.db import connection

from django_mysqlqueue import operations, publish
from django_mysqlqueue.models import (
    ConsumerOffset,
    DeliveryEvent,
    DeliveryState,
    LogMark,
    Operation,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Reader,
    Rollup,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import (
    dead_lettering,
    dropping,
    jobs,
    pausing,
    redriving,
    replaying,
    retrying,
    scheduled,
    seeking,
)
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.operations.replaying import Range
from django_mysqlqueue.operations.seeking import Position
from tests.conftest import empty
from tests.crash.crashes import ALIAS, DLQ, TOPIC
from tests.crash.worlds import LEASE_MS, G, claimed, filtered, orphaned, overriding, registered, sequenced
from tests.support import job_worlds
from tests.support.factories import QuarantinedMessageFactory
from tests.support.filtering import US
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import (
    DeadLetterFilter,
    NewResult,
    Session,
    audit,
    delivery_events,
    heartbeats,
    job_rows,
    leasing,
    pruning,
    readers,
    rollups,
    run,
    samples,
    sequencing,
)

ME = "ada"


@dataclass(frozen=True)
class Act:
    """An operation, from what it starts, and what has been lost or doubled if its messages are not these at the end."""

    name: str
    setup: Callable[[], object]
    run: Callable[[], object]
    audited: bool
    """Each run of it is on record, and what the runs have changed adds up."""


ACTS: dict[str, Act] = {}


def act(name: str, setup: Callable[[], object], *, audited: bool = True) -> Callable[[Callable[[], object]], None]:
    def add(operation: Callable[[], object]) -> None:
        ACTS[name] = Act(name, setup, operation, audited)

    return add


def handled() -> None:
    """A group has handled everything."""
    claimed()
    DeliveryState.objects.all().delete()
    PartitionLease.objects.all().delete()
    last = max(QueueMessage.objects.values_list("offset", flat=True))
    ConsumerOffset.objects.filter(consumer_group="g").update(offset_acked=last, offset_claimed=last)
    ConsumerOffset.objects.filter(consumer_group="other").update(offset_acked=last, offset_claimed=last)


def buried() -> None:
    """All messages of a group are in the DLQ."""

    def fail(delivery: object) -> None:
        raise ValueError("no")

    registered()
    sub = Sub(handler(TOPIC, "g", fail, max_attempts=1), handler(TOPIC, "other"))
    sub.settle()
    sub.leave()
    sequence()
    SubscriberHeartbeat.objects.all().delete()
    DeliveryEvent.objects.all().delete()


def backing_off() -> None:
    claimed()
    later = Session(USING).now() + 10**7
    DeliveryState.objects.filter(consumer_group="g").update(
        delivered_by="", retry_count=2, invisible_until=later, delivery_token=0
    )
    SubscriberHeartbeat.objects.all().delete()
    PartitionLease.objects.all().delete()


def backing_off_for_a_reason() -> None:
    """As ``backing_off``; those of one partition have an error."""
    backing_off()
    DeliveryState.objects.filter(consumer_group="g", partition_key="a").update(last_error="no")


def planned() -> None:
    sequenced()
    for number in range(3):
        publish(TOPIC, f"s{number}", key="s", id=f"s{number}", delay=10**6)


def ids() -> list[int]:
    return list(OutboxMessage.objects.using(ALIAS).filter(deliver_at__gt=1).values_list("pk", flat=True))


def counted() -> None:
    """Rows of history that have outlived their time, and a group that has something to count."""
    sequenced()
    with connection.cursor():
        DeliveryEvent.objects.create(
            consumer_group="g", topic=TOPIC, partition_key="a", message_offset=1, outcome="failed", settled_at=1
        )
        Operation.objects.create(action="pause", started_at=1, ended_at=1)
        LogMark.objects.create(marked_offset=1, mark=1, marked_at=1)
        Rollup.objects.create(grain=60, bucket_at=60_000, consumer_group="g", topic=TOPIC, acked=1)


@act("pause", sequenced)
def _() -> None:
    pausing.set_paused(ALIAS, G, actor=ME, reason="why not", paused=True)


def with_a_reader() -> None:
    sequenced()
    Reader.objects.create(name="lake", topic=TOPIC, read_offset=0)


@act("drop a reader", with_a_reader)
def _() -> None:
    readers.drop(ALIAS, "lake", actor=ME)


def paused() -> None:
    sequenced()
    pausing.set_paused(USING, G, actor="bob", paused=True)


@act("resume", paused)
def _() -> None:
    pausing.set_paused(ALIAS, G, actor=ME, paused=False)


def overridden() -> None:
    sequenced()
    overriding(USING, {"max_attempts": 9, "prefetch": 7}, [], actor="bob")


@act("override options", overridden)
def _() -> None:
    overriding(ALIAS, {"prefetch": 1}, ["max_attempts"], actor=ME)


@act("pause a task", overridden)
def _() -> None:
    pausing.set_task_paused(ALIAS, G, "shop.tasks.mail", actor=ME, paused=True)


@act("override the filter", filtered)
def _() -> None:
    overriding(ALIAS, {"filter": US}, [], actor=ME)


@act("seek back", handled)
def _() -> None:
    seeking.move(ALIAS, G, Position(0), actor=ME)


@act("seek to the end past what is claimed", claimed)
def _() -> None:
    seeking.move(ALIAS, G, seeking.position_of(ALIAS, "latest"), actor=ME)


@act("drop", claimed)
def _() -> None:
    dropping.drop(ALIAS, G, actor=ME)


def half_sought() -> None:
    """A seek of the group died; what it had not deleted is still there."""
    claimed()
    run(USING, lambda session: seeking._begin(session, G, Position(0), "", actor="bob"))


@act("seek where another died", half_sought)
def _() -> None:
    seeking.move(ALIAS, G, Position(0), actor=ME)


@act("drop where a seek died", half_sought)
def _() -> None:
    dropping.drop(ALIAS, G, actor=ME)


@act("redrive", buried)
def _() -> None:
    redriving.redrive_all(ALIAS, DeadLetterFilter(DLQ), actor=ME)


def erasable() -> None:
    """Messages of a key in the log, waiting for another attempt, dead-lettered, scheduled, debounced, and set aside."""
    backing_off_for_a_reason()
    dead = QueueMessage.objects.filter(topic=TOPIC, partition_key="a").order_by("offset").values_list("pk", flat=True)
    dead_lettering.dead_letter_now(USING, G, list(dead[:1]), actor="bob")
    sequence()
    for number in range(2):
        publish(TOPIC, f"s{number}", key="a", id=f"s{number}", delay=10**6)
        publish(TOPIC, f"d{number}", key="a", id=f"d{number}", delay=10**6, coalesce="c")
    QuarantinedMessageFactory(topic=TOPIC, partition_key="a")


@act("erase", erasable)
def _() -> None:
    operations.erase(TOPIC, "a", actor=ME, using=ALIAS)


@act("discard", buried)
def _() -> None:
    redriving.discard_all(ALIAS, DeadLetterFilter(DLQ, group="g"), actor=ME, reason="test")


@act("replace", buried)
def _() -> None:
    letters = QueueMessage.objects.using(ALIAS).filter(topic=DLQ, original_id="b1").values_list("pk", flat=True)
    for offset in list(letters):
        redriving.replace(ALIAS, DLQ, offset, "corrected", actor=ME)


@act("replay a range", handled)
def _() -> None:
    originals = QueueMessage.objects.using(ALIAS).filter(topic=TOPIC, target_group="")
    first, last = (getattr(originals, end)("offset").offset for end in ("earliest", "latest"))
    replaying.publish_copies(
        ALIAS, Range(G, first, last, "r"), upto=last, actor=ME, limits=OperationLimits(dead_letters=2)
    )


@act("publish a test message", sequenced)
def _() -> None:
    operations.publish(TOPIC, "test", id="test", key="a", using=ALIAS, actor=ME, reason="test")


@act("retry", backing_off)
def _() -> None:
    retrying.make_due(ALIAS, G, actor=ME, reset_attempts=True)


@act("retry at another time", backing_off_for_a_reason)
def _() -> None:
    retrying.make_due(ALIAS, G, actor=ME, error="no", due=4 * 10**12, limits=OperationLimits(rows=2))


@act("dead-letter now", backing_off)
def _() -> None:
    waiting = DeliveryState.objects.using(ALIAS).filter(consumer_group="g", delivered_by="", acked=False)
    if offsets := list(waiting.values_list("message_offset", flat=True)):
        dead_lettering.dead_letter_now(ALIAS, G, offsets, actor=ME, reason="test")


@act("dead-letter what a lost subscriber held", orphaned)
def _() -> None:
    held = DeliveryState.objects.using(ALIAS).filter(delivered_by="vanished", partition_key="a", acked=False)
    if offsets := list(held.values_list("message_offset", flat=True)):
        dead_lettering.dead_letter_now(ALIAS, G, offsets, actor=ME)


@act("cancel", planned)
def _() -> None:
    scheduled.change_rows(ALIAS, ids(), scheduled.CANCEL, actor=ME)


def with_jobs() -> None:
    """Jobs that wait, one of them scheduled, and one that runs; and the messages of the others."""
    sequenced()
    job_worlds.claimed("runs")
    job_worlds.scheduled("later")
    waiting = NewResult("waits", "default", "default", job_worlds.PATH, "{}", 0, 0, 1)
    job_rows.insert(Session(USING), [waiting])


@act("cancel jobs", with_jobs)
def _() -> None:
    with job_worlds.configured():
        jobs.cancel(ALIAS, ["runs", "later", "waits", "unknown"], actor=ME)


@act("cancel the jobs of a task", with_jobs)
def _() -> None:
    wanted = jobs.TaskJobs(job_worlds.PATH, job_worlds.JOBS.topic)
    with job_worlds.configured():
        jobs.cancel_all(ALIAS, wanted, actor=ME, limits=OperationLimits(jobs=2))


@act("deliver now", planned)
def _() -> None:
    scheduled.change_rows(ALIAS, ids(), scheduled.NOW, actor=ME)


@act("reschedule", planned)
def _() -> None:
    later = 4 * 10**12
    rows = OutboxMessage.objects.using(ALIAS).filter(pk__in=ids()).exclude(deliver_at=later)
    scheduled.change_rows(ALIAS, list(rows.values_list("pk", flat=True)), later, actor=ME)


@act("release", claimed)
def _() -> None:
    leasing.revoke(ALIAS, G, ["a", "b"], actor=ME)


@act("forget a subscriber", orphaned)
def _() -> None:
    heartbeats.remove(ALIAS, "vanished", actor=ME, lease_ms=LEASE_MS)


@act("count", counted, audited=False)
def _() -> None:
    tally = rollups.Tally(failed=1)
    rollups.add(ALIAS, {G: tally})


@act("sample", counted, audited=False)
def _() -> None:
    minute = Session(ALIAS).now() // 60_000 * 60_000
    for ref, at in samples.claim(ALIAS, [G], {minute - 60_000: {TOPIC: 3}}).items():
        sample = samples.Sample(ALIAS, ref, at)
        sample.begin()
        sample.add(["a", "b"])
        while not sample.is_counted():
            sample.count()
        sample.end()


@act("collect history", counted, audited=False)
def _() -> None:
    delivery_events.collect(ALIAS)
    rollups.collect(ALIAS)
    audit.collect(ALIAS)
    sequencing.collect_marks(ALIAS)


@act("prune", counted, audited=False)
def _() -> None:
    for _ in pruning.prune(ALIAS):
        pass


def begin(one: Act) -> None:
    empty()
    one.setup()
