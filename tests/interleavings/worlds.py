"""What the operations of a schedule start from: a rich state of the queue for each situation, where any two meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from django.db.models import F

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.db.sizes import LATEST_DELIVERY
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.models import (
    CoalesceKey,
    ConsumerGroup,
    DebouncedMessage,
    DeliveryEvent,
    DeliveryState,
    JobResult,
    Operation,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    Rollup,
    Schedule,
    Slots,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dropping, pausing, seeking
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.operations.seeking import Position
from tests.crash.coalescing import with_keys
from tests.crash.crashes import ALIAS, DLQ, TOPIC
from tests.crash.worlds import OTHER, WHO, G, messages, register_filter
from tests.support import job_worlds, refusing, schedule_worlds
from tests.support.claims import claimant_of
from tests.support.filtering import EU, LONG_AGO, REGIONS, US
from tests.support.harness import USING, sequence
from tests.support.internals import (
    Action,
    Claimed,
    GroupRef,
    OptionColumns,
    Session,
    Settlement,
    Want,
    claiming,
    coalescing,
    groups,
    heartbeats,
    leasing,
    payloads,
    relayed_topic,
    run,
    run_id,
    settling,
    watermarks,
)

LOST = "lost"
"""A subscriber that has gone without a word; what it held waits for somebody."""
LEASE_MS = 86_400_000
"""Leases, visibility timeouts and backoffs last a day: none is to run out because an exploration takes long."""


@dataclass
class Start:
    """A situation, and what its subscriber ``WHO`` has in its memory."""

    mode: str
    held: dict[str, Claimed] = field(default_factory=dict)
    """What it has claimed, by message."""
    scheduled: list[int] = field(default_factory=list)
    """Outbox ids of messages whose time has not come."""
    quarantined: list[int] = field(default_factory=list)
    """Quarantine ids of messages that the log has refused."""
    options: OptionColumns | None = None
    """The columns of the group row with which its subscribers begin."""
    filters: tuple[FilterPolicy, ...] = ()
    """The group's filter, and the one that it may be changed to."""
    failed: tuple[int, ...] = ()
    """Offsets of messages of partition b that have failed and are due."""
    debounced: tuple[str, ...] = ()
    """Messages with one coalesce key, the earliest first. A later one replaces it; an operation publishes the last."""
    used_up: frozenset[str] = frozenset()
    """Messages that whoever claims them next dead-letters: their attempts are used up, and their holder is gone."""


def _claim(ref: GroupRef, mode: str, who: str, **look_at: int) -> dict[str, Claimed]:
    heartbeats.beat(USING, who, [ref], {})
    if mode == "ordered":
        assert leasing.acquire(USING, ref, who, list(look_at), lease_ms=LEASE_MS).held == set(look_at)
    watermarks.create_missing(USING, ref, list(look_at))
    claimant = claimant_of(ref, who, 5, LEASE_MS if mode == "shared" else None)
    wants = [Want(key, look_at=number) for key, number in look_at.items()]
    found = claiming.claim(USING, claiming.ClaimRequest(claimant, wants, token=claiming.new_token())).deliveries
    names = payloads.read(USING, [delivery.offset for delivery in found])
    return {names[delivery.offset].message_id: delivery for delivery in found}


def _end(ref: GroupRef, mode: str, outcomes: list[Settlement], **options: object) -> None:
    settling.flush(USING, ref, outcomes, max_attempts=5, shared=mode == "shared")


def busy(mode: str = "ordered") -> Start:
    """Something of everything, so that no operation finds nothing to do.

    Partition a is claimed but for a4, and a2 settled ahead of a1; b1 waits for another attempt and b2 has not been
    claimed; c is settled by all, its lease still there; d1 is in the DLQ; e1 was claimed by a subscriber that is
    gone; a5 has been published, a6 has come due, s1 and s2 wait for their time.
    """
    start = Start(mode)
    groups.register(USING, OTHER, mode="ordered", start="earliest")
    groups.register(USING, G, mode=mode, start="earliest")
    publish_many(TOPIC, messages("a1", "a2", "a3", "a4", "b1", "b2", "c1", "d1", "e1", "e2"))
    sequence()
    theirs = _claim(OTHER, "ordered", "bystander", a=2, c=1)
    _end(OTHER, "ordered", [Settlement(theirs["a2"], Action.ACK), Settlement(theirs["c1"], Action.ACK)])
    start.held = _claim(G, mode, WHO, a=3, b=1, c=1, d=1)
    held = start.held
    _end(
        G,
        mode,
        [
            Settlement(held["a2"], Action.ACK),
            Settlement(held.pop("b1"), Action.NACK, LEASE_MS, "no"),
            Settlement(held.pop("c1"), Action.ACK),
            Settlement(held.pop("d1"), Action.REJECT, 0, "no"),
        ],
    )
    sequence()
    _claim(G, mode, LOST, e=1)
    heartbeats.deregister(USING, LOST, [G])
    gone = DeliveryState.objects.filter(consumer_group="g", delivered_by=LOST)
    gone.update(invisible_until=1)
    publish_many(TOPIC, messages("a5"))
    publish_many(TOPIC, messages("a6", "s1", "s2", delay=10**6))
    OutboxMessage.objects.filter(message_id="a6").update(deliver_at=1)
    start.scheduled = list(OutboxMessage.objects.filter(deliver_at__gt=1).order_by("pk").values_list("pk", flat=True))
    SubscriberHeartbeat.objects.create(
        consumer_group="g", topic=TOPIC, subscriber_name="ancient", heartbeat_at=1, info="{}"
    )
    DeliveryEvent.objects.all().delete()
    DeliveryEvent.objects.create(
        consumer_group="g", topic=TOPIC, partition_key="a", message_offset=1, outcome="failed", settled_at=1
    )
    Operation.objects.create(action="pause", started_at=1, ended_at=1)
    Rollup.objects.create(grain=60, bucket_at=60_000, consumer_group="g", topic=TOPIC, acked=1)
    return start


def shared() -> Start:
    """As ``busy``, with competing consumers."""
    return busy("shared")


def limited() -> Start:
    """As ``shared``; messages of the tenant x (a4, not claimed, and b1, due again) have no slot, and slots are old."""
    start = shared()
    QueueMessage.objects.filter(message_id__in=["a4", "b1"]).update(metadata={"tenant": "x"})
    b1 = QueueMessage.objects.get(message_id="b1")
    DeliveryState.objects.filter(consumer_group="g", message_offset=b1.offset).update(invisible_until=1)
    for key, full_at in (("", 0), (":x", 2**60), (":old", 1)):
        Slots.objects.create(consumer_group="g", topic=TOPIC, limit_key=key, subscriber_name="", full_at=full_at)
    return start


_EU, _US, _BOTH, _ASIA = REGIONS


def _filter(start: Start, **regions: object) -> Start:
    """Registers a filter, and gives messages of the log a region."""
    for name, region in regions.items():
        assert QueueMessage.objects.filter(message_id=name).update(metadata={"region": region})
    register_filter(EU)
    start.options = groups.group_controls(Session(USING), [G])[G].options
    start.filters = EU, US
    return start


def filtered(mode: str = "ordered") -> Start:
    """As ``busy``, with a filter: what is not claimed matches it, the one that it may be changed to, both or none."""
    start = busy(mode)
    publish_many(TOPIC, messages("a7", "a8", "b7", "b8"))
    sequence()
    return _filter(start, a4=_ASIA, a5=_US, a6=_EU, a7=_BOTH, a8=_ASIA, b2=_ASIA, b7=_US, b8=_EU)


def filtered_shared() -> Start:
    return filtered("shared")


def expired(mode: str = "ordered") -> Start:
    """As ``busy``, and of what is not claimed a part has expired."""
    start = busy(mode)
    publish_many(TOPIC, messages("a7", "a8", "b7", "b8"))
    sequence()
    QueueMessage.objects.filter(message_id__in=("a4", "a6", "a7", "b2", "b7")).update(expires_at=LONG_AGO)
    return start


def expired_shared() -> Start:
    return expired("shared")


def coalesced(mode: str = "ordered") -> Start:
    """As ``busy``, with coalesce keys.

    a7 has the key of a1, which is in flight; a8 that of a4, and b7 that of b1, which has failed and is due. In the
    outbox, a5 has the key of a3, which is in flight, too.
    """
    start = busy(mode)
    with_keys(QueueMessage, {"a1": "x", "a3": "w", "b1": "z"})
    claimed = {name: QueueMessage.objects.get(message_id=name) for name in ("a1", "a3")}
    keys = [(G.group, TOPIC, row.partition_key, row.coalesce_key, row.offset, 0) for row in claimed.values()]
    run(USING, lambda session: coalescing.note(session, keys))
    publish_many(TOPIC, messages("a7", "a8", "b7"))
    OutboxMessage.objects.filter(message_id__in=("a5", "a6")).update(deliver_at=LATEST_DELIVERY)
    sequence()
    OutboxMessage.objects.filter(message_id="a5").update(deliver_at=0)
    OutboxMessage.objects.filter(message_id="a6").update(deliver_at=1)
    with_keys(QueueMessage, {"a7": "x", "a4": "y", "a8": "y", "b7": "z"})
    with_keys(OutboxMessage, {"a5": "w"})
    run(USING, lambda session: coalescing.follow(session, 0))
    failed = QueueMessage.objects.get(message_id="b1").offset
    DeliveryState.objects.filter(consumer_group="g", message_offset=failed).update(invisible_until=1)
    start.failed = (failed,)
    CoalesceKey.objects.create(
        consumer_group="", topic="gone", partition_key="k", coalesce_key="c", message_offset=10**15
    )
    return start


def coalesced_shared() -> Start:
    return coalesced("shared")


def superseding(mode: str = "ordered") -> Start:
    """As ``coalesced``, with a filter that matches all; the one to which it may be changed matches no later message.

    So what is given up because of one of these would be lost with it.
    """
    start = coalesced(mode)
    OutboxMessage.objects.filter(message_id="a5").update(metadata={"region": _BOTH})
    later = ("a7", "a8", "b7")
    for one in QueueMessage.objects.all():
        one.metadata = {**one.metadata, "region": _EU if one.message_id in later else _BOTH}
        one.save(update_fields=["metadata"])
    return _filter(start)


def superseding_shared() -> Start:
    return superseding("shared")


def superseding_expired(mode: str = "ordered") -> Start:
    """As ``superseding``, but what supersedes other messages has expired."""
    start = superseding(mode)
    QueueMessage.objects.filter(message_id__in=("a8", "b7")).update(expires_at=LONG_AGO)
    return start


def superseding_expired_shared() -> Start:
    return superseding_expired("shared")


def coalesced_later() -> Start:
    """As ``coalesced_shared``, but b7, which supersedes b1, is in the outbox."""
    start = coalesced("shared")
    later = QueueMessage.objects.get(message_id="b7")
    later.delete()
    publish_many(TOPIC, messages("b7"))
    with_keys(OutboxMessage, {"b7": "z"})
    CoalesceKey.objects.filter(consumer_group="", coalesce_key="z").update(message_offset=start.failed[0])
    return start


def relayed() -> Start:
    """Messages in the log that are on their way to the database, which is its own source here."""
    start = busy()
    publish_many(TOPIC, [Message(name, key=name[0], id=name) for name in ("a7", "b7", "a8")])
    OutboxMessage.objects.filter(message_id__in=("a7", "b7", "a8")).update(topic=relayed_topic(TOPIC, ALIAS))
    sequence()
    return start


def with_jobs() -> Start:
    """Jobs that a subscriber holds, beside everything else."""
    start = busy()
    start.held |= job_worlds.claimed(*job_worlds.ENDS)
    return start


def with_waiting_jobs() -> Start:
    """As ``with_jobs``, and some wait for their next attempts: one in place, two in the outbox."""
    start = with_jobs()
    job_worlds.flush_waits(ALIAS, start.held)
    # So that it still waits in the last schedule.
    DeliveryState.objects.filter(topic=job_worlds.JOBS.topic, invisible_until__gt=0, delivery_token=0).update(
        invisible_until=F("invisible_until") + job_worlds.LONG
    )
    return start


def with_chain() -> Start:
    """A chain of jobs: a subscriber holds the first stage, beside everything else."""
    start = busy()
    start.held |= job_worlds.chained()
    return start


def with_waiting_chain() -> Start:
    """A chain of jobs that nobody has claimed, beside everything else."""
    start = busy()
    job_worlds.waiting_chain()
    return start


def with_skipped_chain() -> Start:
    """As ``with_chain``, but a seek that was interrupted has skipped the first stage."""
    start = busy()
    start.held |= job_worlds.skipped()
    JobResult.objects.filter(id=job_worlds.SECOND).update(unique_key=job_worlds.UNIQUE)
    return start


def with_unique_job() -> Start:
    """As ``with_jobs``, and a job that waits is unique."""
    start = busy()
    job_worlds.enqueued(job_worlds.FIRST, job_worlds.SECOND)
    JobResult.objects.filter(id=job_worlds.FIRST).update(unique_key=job_worlds.UNIQUE)
    return start


def with_single_job() -> Start:
    """As ``with_jobs``, and one of those that a subscriber holds is unique until it has ended."""
    start = with_jobs()
    JobResult.objects.filter(id="acked").update(unique_key=job_worlds.UNIQUE, kept_key=job_worlds.UNIQUE)
    return start


def with_late_job() -> Start:
    """As ``with_single_job``, but the job no longer holds its key: its time is over."""
    start = with_single_job()
    JobResult.objects.filter(id="acked").update(unique_since=1, unique_for=1)
    return start


def with_failed_single_job() -> Start:
    """A job that is unique until it has ended has failed."""
    start = with_jobs()
    job_worlds.flush(ALIAS, start.held)
    JobResult.objects.filter(id="dead").update(kept_key=job_worlds.UNIQUE)
    return start


def scheduled() -> Start:
    """A schedule of a task that is due once a day, beside everything else: its last job runs, and it is due now."""
    start = busy()
    tick = 1000
    start.held |= job_worlds.claimed(run_id(schedule_worlds.NAME, tick))
    schedule_worlds.registered(schedule_worlds.daily(), age=86_410)
    Schedule.objects.update(seen_at=0)
    return start


def scheduled_free() -> Start:
    """As ``scheduled``, and no job of the schedule runs."""
    start = busy()
    schedule_worlds.registered(schedule_worlds.daily(), age=86_410)
    Schedule.objects.update(seen_at=0)
    return start


def scheduled_by_people() -> Start:
    """As ``scheduled_free``, but people have made the schedule."""
    start = busy()
    schedule_worlds.created(schedule_worlds.daily(), age=86_410)
    Schedule.objects.update(seen_at=0)
    return start


def debounced() -> Start:
    """As ``busy``, with debounced messages: a7 and a9 have come due, a8 waits. b7 has waited its maximum, b8 waits."""
    start = busy()
    sequence()
    for name, longest in (("a7", None), ("b7", 1200), ("a8", None), ("a9", 1200), ("b8", None)):
        publish_many(TOPIC, messages(name, coalesce=name[0], delay=600, max_delay=longest))
    OutboxMessage.objects.filter(message_id__in=("a7", "a9", "b7")).update(deliver_at=1)
    DebouncedMessage.objects.filter(message_id="b7").update(deliver_by=1)
    DebouncedMessage.objects.create(outbox_id=10**15, topic=TOPIC, partition_key="a", message_id="x", coalesce_key="a")
    start.debounced = ("a7", "a8", "a9", "a10")
    return start


def refused() -> Start:
    """As ``busy``, with messages that the log refuses: one in the outbox, and two in the quarantine.

    Of these, the cause of the first is fixed: the log will take it.
    """
    start = busy()
    OutboxMessage.objects.filter(message_id__in=("a5", "a6")).update(deliver_at=LATEST_DELIVERY)
    publish_many(TOPIC, [Message(refusing.PAYLOAD, key=key, id=f"{key}7") for key in "ab"])
    sequence()
    start.quarantined = list(QuarantinedMessage.objects.order_by("pk").values_list("pk", flat=True))
    QuarantinedMessage.objects.filter(pk=start.quarantined[0]).update(payload=b'"a7"')
    OutboxMessage.objects.filter(message_id="a5").update(deliver_at=0)
    OutboxMessage.objects.filter(message_id="a6").update(deliver_at=1)
    publish_many(TOPIC, [Message(refusing.PAYLOAD, key="a", id="a8"), *messages("b8")])
    return start


def fresh_filtered(start: Callable[[], Start] | None = None) -> Start:
    """As ``fresh``, with a filter, and messages that match as in ``filtered``."""
    found = (start or fresh)()
    publish_many(TOPIC, messages("b2"))
    publish_many(TOPIC, [Message("b3", key="b", id="b3", metadata={"region": _US})])
    sequence()
    return _filter(found, a1=_US, a2=_EU, a3=_ASIA, b1=_BOTH, b2=_ASIA)


def fresh_filtered_shared() -> Start:
    return fresh_filtered(fresh_shared)


def forsaken() -> Start:
    """As ``busy``, and ``WHO`` has no heartbeat any more: it may be frozen, or gone."""
    start = busy()
    heartbeats.deregister(USING, WHO, [G])
    return start


def forsaken_shared() -> Start:
    """As ``shared``, and what ``WHO`` holds is visible again."""
    start = shared()
    heartbeats.deregister(USING, WHO, [G])
    DeliveryState.objects.filter(consumer_group="g", delivered_by=WHO).update(invisible_until=1)
    return start


def paused() -> Start:
    start = busy()
    pausing.set_paused(USING, G, actor="before", paused=True)
    return start


def all_settled() -> Start:
    """Both groups have settled everything; the leases are still there."""
    start = Start("ordered")
    for ref in (OTHER, G):
        groups.register(USING, ref, mode="ordered", start="earliest")
    publish_many(TOPIC, messages("a1", "a2", "b1"))
    sequence()
    for ref, who in ((OTHER, "bystander"), (G, WHO)):
        held = _claim(ref, "ordered", who, a=2, b=1)
        _end(ref, "ordered", [Settlement(one, Action.ACK) for one in held.values()])
    return start


def behind() -> Start:
    """As ``all_settled``, but one group has claimed everything and settled nothing: GC waits for it alone."""
    start = Start("ordered")
    for ref in (OTHER, G):
        groups.register(USING, ref, mode="ordered", start="earliest")
    publish_many(TOPIC, messages("a1", "a3", "b1"))
    sequence()
    theirs = _claim(OTHER, "ordered", "bystander", a=2, b=1)
    _end(OTHER, "ordered", [Settlement(one, Action.ACK) for one in theirs.values()])
    start.held = _claim(G, "ordered", WHO, a=2, b=1)
    return start


def emptied() -> Start:
    """GC has taken all that there was of partition a, but not the offsets rows; a9 has been published to it."""
    start = all_settled()
    QueueMessage.objects.filter(topic=TOPIC, partition_key="a").delete()
    publish_many(TOPIC, messages("a9"))
    return start


def fresh() -> Start:
    """Messages in the log and in the outbox, and a group that nobody has worked for yet."""
    start = Start("ordered")
    groups.register(USING, OTHER, mode="ordered", start="earliest")
    groups.register(USING, G, mode="ordered", start="earliest")
    publish_many(TOPIC, messages("a1", "a2", "b1"))
    sequence()
    publish_many(TOPIC, messages("a3"))
    return start


def fresh_shared() -> Start:
    start = fresh()
    ConsumerGroup.objects.filter(consumer_group="g").update(mode="shared")
    start.mode = "shared"
    return start


def buried() -> Start:
    """Three messages of a group are in the DLQ."""
    start = fresh()
    held = _claim(G, "ordered", WHO, a=2, b=1)
    _end(G, "ordered", [Settlement(one, Action.REJECT, 0, "no") for one in held.values()])
    sequence()
    heartbeats.forget(USING, WHO, [G])
    return start


def used_up() -> Start:
    """As ``forsaken``; whatever is in flight or in backoff has no attempt left."""
    start = forsaken()
    DeliveryState.objects.filter(consumer_group="g", acked=False).update(retry_count=5)
    start.used_up = frozenset({"a1", "a3", "e1"})
    return start


def lost_again(start: Callable[[], Start] = forsaken) -> Start:
    """As ``forsaken``; whatever is in flight was lost before, and its start is recorded."""
    found = start()
    held = DeliveryState.objects.filter(consumer_group="g", acked=False).exclude(delivery_token=0)
    held.update(suspect=True, retry_count=1)
    found.held = {name: one._replace(attempt=1) for name, one in found.held.items()}
    return found


def lost_again_shared() -> Start:
    return lost_again(forsaken_shared)


def undertaker() -> Start:
    """As ``buried``, and a group on the DLQ topic, whose subscriber has claimed the dead letters of partition a."""
    buried()
    start = Start("ordered")
    dead = GroupRef("d", DLQ)
    groups.register(USING, dead, mode="ordered", start="earliest")
    start.held = _claim(dead, "ordered", WHO, a=2)
    return start


def seek_interrupted() -> Start:
    """As ``busy``; a process died in the midst of a seek: the offsets are stored, the state rows are not deleted."""
    start = busy()
    operation = run(USING, lambda session: seeking._begin(session, G, Position(0), "", actor="dead"))
    run(USING, lambda session: seeking._reset_offsets(session, G, Position(0), operation, ""))
    return start


def drop_interrupted() -> Start:
    """As ``busy``; a process died in the midst of a drop: leases and state rows are gone, offsets rows are not."""
    start = busy()
    operation = run(USING, lambda session: dropping._begin(session, G, actor="dead"))
    assert operation is not None
    for _ in range(2):
        assert run(USING, lambda session: dropping._delete_some(session, G, operation, LIMITS))
    return start


_ALL = (
    busy,
    shared,
    limited,
    filtered,
    filtered_shared,
    expired,
    expired_shared,
    coalesced,
    coalesced_shared,
    coalesced_later,
    superseding,
    superseding_shared,
    superseding_expired,
    superseding_expired_shared,
    debounced,
    refused,
    relayed,
    with_chain,
    with_jobs,
    with_waiting_jobs,
    with_waiting_chain,
    with_skipped_chain,
    with_unique_job,
    with_single_job,
    with_late_job,
    with_failed_single_job,
    scheduled,
    scheduled_free,
    scheduled_by_people,
    forsaken,
    forsaken_shared,
    paused,
    all_settled,
    behind,
    emptied,
    fresh,
    fresh_shared,
    fresh_filtered,
    fresh_filtered_shared,
    buried,
    used_up,
    lost_again,
    lost_again_shared,
    undertaker,
    seek_interrupted,
    drop_interrupted,
)
WORLDS: dict[str, Callable[[], Start]] = {one.__name__: one for one in _ALL}
