"""What the crash harness ends at every statement: operations, and what is particular about each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.test import override_settings

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    LogMark,
    OutboxMessage,
    PartitionLease,
    QuarantinedMessage,
    RelayWatermark,
    Sequencer,
    Slots,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dropping, group_mode, moving
from django_mysqlqueue.options.delivery_limits import NO_KEY
from django_mysqlqueue.testing import _advance
from tests.app.models import Effect
from tests.crash.audit import Picture
from tests.crash.crashes import ALIAS, TOPIC
from tests.crash.worlds import (
    LEASE_MS,
    NAMES,
    REGIONS,
    REJECT,
    WHO,
    G,
    World,
    acked_ahead,
    claimed,
    collectable,
    drained,
    expired,
    expiring,
    filtered,
    finished,
    flush,
    flushed_database,
    handed_out,
    holding,
    inherited,
    leased,
    limited,
    lost_again,
    messages,
    orphaned,
    outdated,
    quarantined,
    refused,
    register_filter,
    registered,
    retried,
    scheduled,
    sequenced,
    shared,
    subscribed,
)
from tests.support import garbage
from tests.support.filtering import US, matches
from tests.support.harness import USING, first_place, lag
from tests.support.internals import (
    EPOCH,
    Action,
    Budget,
    Due,
    GroupRef,
    Returned,
    Route,
    Session,
    Want,
    claiming,
    groups,
    heartbeats,
    leasing,
    publishing,
    relayed_topic,
    relaying,
    releasing,
    routing,
    scheduling,
    sequencing,
    settling,
    slots,
    watermarks,
)


@dataclass(frozen=True)
class Case:
    """An operation, and what is particular about it."""

    name: str
    setup: Callable[[], World]
    operation: Callable[[World], object]
    again: Callable[[World], object] | None
    """What a process that has lived through the error does next."""
    commits: int | None
    """1: what has happened is all of it or nothing. None: it is several transactions."""
    dead: tuple[str, ...]
    """Messages that it dead-letters."""
    fails: tuple[str, ...]
    """Messages that lose an attempt."""
    unsure: bool
    """The transaction is the caller's: an error does not say whether it has committed."""
    atomic: bool
    """Handlers write their effects in the delivery's transaction, also while the rest is handled."""
    rerun: bool
    """After a kill somebody runs it again."""
    forgets: tuple[GroupRef, ...]
    """The groups that it drops."""
    lives: bool
    """It is about what a process that lives on remembers: a killed one only sends what other cases send."""
    cancels: tuple[str, ...]
    """Messages that it deletes before they are in the log."""
    role: str
    """Whose work it is."""
    check: Callable[[World, Picture], None] | None


CASES: dict[str, Case] = {}
ELSEWHERE = "queue"
"""Another database, to which nothing happens."""
SAME = object()


def case(
    name: str,
    setup: Callable[[], World],
    *,
    again: Any = SAME,
    commits: int | None = 1,
    dead: tuple[str, ...] = (),
    fails: tuple[str, ...] = (),
    unsure: bool = False,
    atomic: bool = False,
    rerun: bool = False,
    forgets: tuple[GroupRef, ...] = (),
    lives: bool = False,
    cancels: tuple[str, ...] = (),
    role: str = "subscriber",
    check: Callable[[World, Picture], None] | None = None,
) -> Callable[[Callable[[World], object]], Callable[[World], object]]:
    """Adds a case. ``again``: the operation itself, unless another is given, or None."""

    def add(operation: Callable[[World], object]) -> Callable[[World], object]:
        then = operation if again is SAME else again
        assert name not in CASES
        CASES[name] = Case(
            name,
            setup,
            operation,
            then,
            commits,
            dead,
            (*dead, *fails),
            unsure,
            atomic,
            rerun,
            forgets,
            lives,
            cancels,
            role,
            check,
        )
        return operation

    return add


# publishing and sequencing


def is_there(world: World, picture: Picture) -> None:
    assert picture.messages["a9"] == picture.tables["effects"].count("order a9")


@case("publish with a row", registered, role="publisher", again=None, unsure=True, check=is_there)
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="order a9")
        publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)


@case("publish alone", registered, role="publisher", again=None, unsure=True)
def _(world: World) -> None:
    publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)


@case("publish with a priority", registered, role="publisher", again=None, unsure=True)
def _(world: World) -> None:
    publish(TOPIC, "a9", key="a", id="a9", priority=10, using=ALIAS)


@case("publish and once more with the same id", sequenced, role="publisher", unsure=True, commits=None)
def _(world: World) -> None:
    publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)


@case("publish_many in chunks", registered, role="publisher", again=None, unsure=True)
def _(world: World) -> None:
    before, publishing.CHUNK_ROWS = publishing.CHUNK_ROWS, 2
    try:
        publish_many(TOPIC, messages("a7", "a8", "a9", "b9"), using=ALIAS)
    finally:
        publishing.CHUNK_ROWS = before


def is_not_there(world: World, picture: Picture) -> None:
    assert picture.messages["a9"] == picture.tables["effects"].count("order a9") == 0


@case("publish rolled back", registered, role="publisher", again=None, commits=None, check=is_not_there)
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="order a9")
        publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)
        transaction.set_rollback(True, using=ALIAS)


@case("sequence", scheduled)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


def mark_due() -> World:
    """The last mark of the log is old."""
    world = scheduled()
    Sequencer.objects.update(marked_at=0)
    return world


def has_a_mark(world: World, picture: Picture) -> None:
    """It is in the transaction that appends."""
    names = {one.id for one in picture.rows.log.values()}
    assert LogMark.objects.count() == ("a5" in names)


@case("sequence and mark the log", mark_due, check=has_a_mark)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


def prioritized() -> World:
    """Messages of two keys with priorities, behind those without."""
    world = registered()
    publish_many(TOPIC, [*messages("a7", "b7", priority=10), *messages("a8", "b8", priority=-10)])
    return world


@case("sequence priorities", prioritized)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


REFUSED = {"a8", "b4"}


def is_set_aside(world: World, picture: Picture) -> None:
    """The messages that the log refuses, and no others, once the others are in the log, in their order."""
    names = [one.id for one in picture.rows.log.values()]
    assert picture.aside == (REFUSED if "a5" in names else set())
    assert names[len(NAMES) :] == (["a5", "a7", "b3", "b5"] if picture.aside else [])


@case("sequence what the log refuses", refused, check=is_set_aside)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


def is_on_record(world: World, picture: Picture) -> None:
    """All have left the quarantine or none, and the audit log says so."""
    changed = sum(one.changed for one in picture.rows.operations)
    assert (picture.aside, changed) in ((REFUSED, 0), (set(), len(REFUSED)))


def in_quarantine() -> list[int]:
    return list(QuarantinedMessage.objects.using(ALIAS).values_list("pk", flat=True))


@case("requeue", quarantined, role="operator", check=is_on_record)
def _(world: World) -> None:
    if rows := in_quarantine():
        operations.requeue_quarantined(rows, actor=WHO, using=ALIAS)


@case("delete from the quarantine", quarantined, role="operator", check=is_on_record)
def _(world: World) -> None:
    if rows := in_quarantine():
        operations.delete_quarantined(rows, actor=WHO, using=ALIAS)


@case("sequence without the mutex's row", flushed_database)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


@case("identify the log of a flushed database", flushed_database)
def _(world: World) -> None:
    sequencing.identify(ALIAS)


def relayable() -> World:
    """Messages in the log that are on their way to the database, which is its own source here."""
    world = sequenced()
    publish_many(TOPIC, messages("a7", "b7", "a8"))
    OutboxMessage.objects.filter(message_id__in=("a7", "b7", "a8")).update(topic=relayed_topic(TOPIC, ALIAS))
    sequencing.sequence(USING)
    return world


def have_arrived(world: World, picture: Picture) -> None:
    assert [picture.messages[name] for name in ("a7", "b7", "a8")] == [1, 1, 1]


@case("relay", relayable, commits=None, rerun=True, check=have_arrived)
def _(world: World) -> None:
    while relaying.relay(ALIAS, ALIAS, max_rows=2).more:
        pass


def restored() -> World:
    """The log as of a backup, with a watermark above its end."""
    world = relayable()
    RelayWatermark.objects.using(ALIAS).create(target=ALIAS, relayed_offset=10**6, read_offset=10**6)
    return world


@case("relay from a log that went back", restored, commits=None, rerun=True, check=have_arrived)
def _(world: World) -> None:
    while relaying.relay(ALIAS, ALIAS, max_rows=2).more:
        pass


@case("relay a message that was refused", relayable, commits=None, rerun=True, check=have_arrived)
def _(world: World) -> None:
    relaying.note_refusal(ALIAS, ALIAS, first_place(ALIAS), "an error")
    relaying.relay(ALIAS, ALIAS)


MOVED = GroupRef("moved", TOPIC)
"""A group that comes from the other database."""


def all_groups_run(world: World, picture: Picture) -> None:
    assert not any(group.paused for group in picture.rows.groups.values())


@case("move a topic here", sequenced, role="operator", commits=None, rerun=True, check=all_groups_run)
def _(world: World) -> None:
    groups.register(ELSEWHERE, MOVED, mode="ordered", start="earliest")
    move = moving.Move(TOPIC, ELSEWHERE, ELSEWHERE, ALIAS, WHO)
    moving.prepare(move)
    moving.cut(move)
    assert moving.has_left(moving.Move(TOPIC, ELSEWHERE, ALIAS, ELSEWHERE, WHO), 0)
    moving.hand_over(move, MOVED)


def prepared_move() -> World:
    """A topic that is prepared to come here, where the cut was interrupted."""
    world = sequenced()
    groups.register(ELSEWHERE, MOVED, mode="ordered", start="earliest")
    moving.prepare(moving.Move(TOPIC, ELSEWHERE, ELSEWHERE, ALIAS, WHO))
    groups.run(USING, lambda session: routing.set_route(session, TOPIC, Route(routing.HERE, ELSEWHERE)))
    return world


def nobody_waits(world: World, picture: Picture) -> None:
    assert MOVED not in picture.rows.groups
    assert routing.route_of(Session(USING), TOPIC) is None


@case("cancel a move", prepared_move, role="operator", commits=None, rerun=True, forgets=(MOVED,), check=nobody_waits)
def _(world: World) -> None:
    moving.cancel(moving.Move(TOPIC, ELSEWHERE, ELSEWHERE, ALIAS, WHO))
    moving.cancel(moving.Move("other", ALIAS, ELSEWHERE, ELSEWHERE, WHO))


@case("divide a topic's messages", sequenced, role="operator", commits=None, rerun=True)
def _(world: World) -> None:
    move = moving.Move(TOPIC, ALIAS, ELSEWHERE, ALIAS, WHO)
    moving.cut(move)
    moving.finish(move)


@case("bring what is scheduled nearer", scheduled)
def _(world: World) -> None:
    _advance(ALIAS, 601_000)


def planned() -> World:
    """Two scheduled messages."""
    world = sequenced()
    publish_many(TOPIC, messages("a6", "b4", delay=600))
    return world


def is_gone(world: World, picture: Picture) -> None:
    assert picture.messages["a6"] == 1 - picture.tables["effects"].count("no a6")


@case("cancel with a row", planned, role="scheduler", again=None, unsure=True, cancels=("a6",), check=is_gone)
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="no a6")
        assert scheduling.cancel("a6", topic=TOPIC, using=ALIAS) == 1


@case("cancel alone", planned, role="scheduler", cancels=("a6",))
def _(world: World) -> None:
    scheduling.cancel("a6", topic=TOPIC, using=ALIAS)


@case("reschedule with a row", planned, role="scheduler", again=None, unsure=True)
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="soon a6")
        assert scheduling.reschedule("a6", topic=TOPIC, delay=0, using=ALIAS) == 1


@case("reschedule alone", planned, role="scheduler")
def _(world: World) -> None:
    scheduling.reschedule("a6", topic=TOPIC, deliver_at=EPOCH, using=ALIAS)


# groups, heartbeats, leases


@case("register a group", sequenced, unsure=True)  # it reads the row after its transaction
def _(world: World) -> None:
    groups.register(ALIAS, GroupRef("new", TOPIC), mode="ordered", start="earliest")


def frozen(mode: str) -> World:
    """Its subscriber has fallen silent with all that it holds."""
    world = claimed(mode)
    SubscriberHeartbeat.objects.filter(subscriber_name=WHO).update(heartbeat_at=1)
    return world


def no_lease_is_left(world: World, picture: Picture) -> None:
    if ConsumerGroup.objects.get(consumer_group="g").mode != world.mode:
        assert not PartitionLease.objects.filter(consumer_group="g").exists()


for _mode, _other in (("ordered", "shared"), ("shared", "ordered")):

    @case(
        f"change a group's mode to {_other}", lambda mode=_mode: frozen(mode), role="operator", check=no_lease_is_left
    )
    def _(world: World, other: str = _other) -> None:
        group_mode.set_mode(ALIAS, G, other, lease_ms=LEASE_MS, actor="test")


@case("drop a group", acked_ahead, role="operator", commits=None, rerun=True, forgets=(G,))
def _(world: World) -> None:
    dropping.drop(ALIAS, G, actor="test")


@case("beat", leased, unsure=True)  # it is one statement, whose answer may be lost
def _(world: World) -> None:
    heartbeats.beat(ALIAS, WHO, [G, GroupRef("g", "u")], {})


@case("deregister", claimed)
def _(world: World) -> None:
    heartbeats.deregister(ALIAS, WHO, [G])


@case("report a breakdown", claimed)
def _(world: World) -> None:
    heartbeats.report(ALIAS, WHO, G, "KeyError: 'k'")


@case("refuse to start", claimed)
def _(world: World) -> None:
    heartbeats.refuse(ALIAS, WHO, {"refused": "its mode has changed"})


@case("forget a heartbeat", claimed)
def _(world: World) -> None:
    heartbeats.forget(ALIAS, WHO, [G])


def old_beat() -> World:
    world = claimed()
    SubscriberHeartbeat.objects.filter(subscriber_name=WHO).update(heartbeat_at=1)
    return world


@case("forget old heartbeats", old_beat)
def _(world: World) -> None:
    heartbeats.forget_old(ALIAS)


@case("acquire", sequenced)
def _(world: World) -> None:
    leasing.acquire(ALIAS, G, WHO, "ab", lease_ms=LEASE_MS)


@case("acquire by theft", orphaned, dead=("a1",))
def _(world: World) -> None:
    leasing.acquire(ALIAS, G, WHO, "ab", lease_ms=LEASE_MS)


@case("verify leases", claimed)
def _(world: World) -> None:
    assert leasing.verify_owned(ALIAS, G, WHO, "ab") == {"a", "b"}


@case("release", claimed)
def _(world: World) -> None:
    leasing.release(ALIAS, G, WHO, "ab")


for _mode in ("ordered", "shared"):

    @case(f"release everything, {_mode}", lambda mode=_mode: claimed(mode))
    def _(world: World) -> None:
        releasing.release_all(ALIAS, WHO, [G], shared=[G] if world.mode == "shared" else [])

    @case(f"release everything of a dead process, {_mode}", lambda mode=_mode: claimed(mode))
    def _(world: World) -> None:
        shared = [G] if world.mode == "shared" else []
        releasing.release_all(ALIAS, WHO, [G], shared=shared, died="SIGKILL")


def release_unfinished(world: World) -> None:
    ends = world.ends(Action.RELEASE, *sorted(world.held))
    releasing.release_unfinished(ALIAS, G, ends, max_attempts=5)


def is_uncounted(world: World, picture: Picture) -> None:
    """What was released has lost no attempt, and is held by nobody."""
    rows = DeliveryState.objects.filter(consumer_group="g", delivery_token=0)
    assert set(rows.values_list("delivered_by", "retry_count")) <= {("", 0)}


for _mode in ("ordered", "shared"):
    case(f"release what is cut off, {_mode}", lambda mode=_mode: claimed(mode), check=is_uncounted)(release_unfinished)

    @case(f"release what is cut off, then everything, {_mode}", lambda mode=_mode: claimed(mode), commits=None)
    def _(world: World) -> None:
        release_unfinished(world)
        releasing.release_all(ALIAS, WHO, [G], shared=[G] if world.mode == "shared" else [])


for _mode in ("ordered", "shared"):

    @case(f"release what has not started, {_mode}", lambda mode=_mode: claimed(mode), check=is_uncounted)
    def _(world: World) -> None:
        releasing.release_unstarted(ALIAS, [G], [(one.offset, one.token) for one in world.held.values()])


@case("drop drained leases", drained)
def _(world: World) -> None:
    leasing.drop_drained(ALIAS, G, WHO, "ab")


@case("create offsets rows", sequenced)
def _(world: World) -> None:
    watermarks.create_missing(ALIAS, G, "ab")


# claims


def undo(world: World) -> None:
    claiming.undo(ALIAS, G, world.token)


def is_undone(world: World, picture: Picture) -> None:
    """A process that has undone a claim holds nothing of it (one that was killed does not say what its token was)."""
    held = DeliveryState.objects.filter(delivery_token=world.token, acked=False)
    assert not held.exclude(delivery_token=0).exists()


def take(world: World, *wants: Want, **options: Any) -> None:
    world.token = claiming.new_token()
    claiming.claim(ALIAS, claiming.ClaimRequest(world.claimant(), wants, token=world.token, **options))


@case("claim", leased, again=undo, check=is_undone)
def _(world: World) -> None:
    take(world, Want("a", look_at=2), Want("b", look_at=10))


@case("claim and flush", drained, again=undo, check=is_undone, fails=("b2",))
def _(world: World) -> None:
    take(
        world,
        Want("a", look_at=2),
        settlements=world.ends(Action.ACK, "b1") + world.ends(Action.NACK, "b2", error="no"),
    )


@case("claim what a vanished subscriber held", inherited, again=undo, check=is_undone, dead=("a1",))
def _(world: World) -> None:
    take(world, *(Want(key, due=tuple(at for name, at in world.places.items() if name[0] == key)) for key in "ab"))


for _mode in ("ordered", "shared"):

    @case(f"claim with limits, {_mode}", lambda mode=_mode: limited(mode), again=undo, check=is_undone)
    def _(world: World) -> None:
        wants = [Want(key, look_at=10) for key in "ab"]
        take(world, *wants, due=Due(10), holding=world.holding())


def parked() -> World:
    world = holding()
    assert DeliveryState.objects.filter(consumer_group="g", delivery_token=0).update(invisible_until=1)
    return world


@case("claim without slots, shared", parked, again=undo, check=is_undone)
def _(world: World) -> None:
    take(world, due=Due(10), holding=world.holding(world.stored, stored=world.stored))


@case("claim and release slots", holding, again=undo, check=is_undone)
def _(world: World) -> None:
    back = {NO_KEY: Returned(1, 1), ":x": Returned(1, 1)}
    take(
        world,
        Want("b", look_at=10),
        due=Due(10),
        holding=world.holding({NO_KEY: 1}, stored=world.stored, returned=back),
    )


@case("flush and release slots", holding)
def _(world: World) -> None:
    back = Returned(1, 1)
    settling.flush(
        ALIAS,
        G,
        world.ends(Action.ACK, *world.held),
        max_attempts=5,
        shared=True,
        holding=world.holding(stored=world.stored, doubtful={":z"}, returned={NO_KEY: back, ":x": back}),
    )


def old_slots() -> World:
    world = holding()
    Slots.objects.update(full_at=1)
    SubscriberHeartbeat.objects.filter(subscriber_name="bystander", consumer_group="g").delete()
    return world


def left() -> World:
    """The owner of the leases, of which one is drained, is lost for longer than its heartbeat is kept."""
    world = drained()
    SubscriberHeartbeat.objects.filter(consumer_group="g").delete()
    PartitionLease.objects.filter(consumer_group="g").update(leased_at=1)
    return world


@case("collect leases", left)
def _(world: World) -> None:
    leasing.collect(ALIAS)


@case("collect slots", old_slots)
def _(world: World) -> None:
    slots.collect(ALIAS)


@case("register limits", claimed, role="operator")
def _(world: World) -> None:
    groups.register_options(ALIAS, G, "limits", {"rate": "9000/s"}, actor="migrate")


def passed_what_does_not_match(world: World, picture: Picture) -> None:
    """The claim has taken what matches, and the position has passed the rest."""
    is_undone(world, picture)
    for message in picture.rows.log.values():
        if message.offset <= picture.rows.offsets[G, message.key].claimed:
            is_taken = (G, message.key, message.offset) in picture.rows.state
            assert is_taken == matches(message, world.filter), f"{message.id} was taken or passed by mistake"


def passed_nothing(world: World, picture: Picture) -> None:
    """Neither what the filter of now lets through, nor what the one before did."""
    is_undone(world, picture)
    for message in picture.rows.log.values():
        if message.id in ("a5", "a6", "b3"):
            assert message.offset > picture.rows.offsets[G, message.key].claimed, f"{message.id} was claimed or passed"


for _mode in ("ordered", "shared"):

    @case(
        f"claim with a filter, {_mode}", lambda mode=_mode: filtered(mode), again=undo, check=passed_what_does_not_match
    )
    def _(world: World) -> None:
        take(world, Want("a", look_at=10), Want("b", look_at=10), due=Due(10))

    @case(
        f"claim with a filter and look deeper, {_mode}",
        lambda mode=_mode: filtered(mode, ("a5", "a6", "a7", "a8")),
        again=undo,
        check=passed_what_does_not_match,
    )
    def _(world: World) -> None:
        take(world, Want("a", look_at=1), Want("b", look_at=1), due=Due(1))

    @case(
        f"claim with a filter one of several, {_mode}",
        lambda mode=_mode: filtered(mode, ("a5", "a6", "a7", "a8")),
        again=undo,
        check=passed_what_does_not_match,
    )
    def _(world: World) -> None:
        take(world, Want("a", look_at=1), Want("b", look_at=1), due=Due(1), budget=Budget(rows=1))

    @case(
        f"claim that passes what has expired, {_mode}",
        lambda mode=_mode: expired(mode, ("a5", "a6", "a7")),
        again=undo,
        check=passed_what_does_not_match,
    )
    def _(world: World) -> None:
        take(world, Want("a", look_at=1), Want("b", look_at=10), passes=["expired"])

    @case(
        f"claim and flush under outdated options, {_mode}",
        lambda mode=_mode: outdated(mode),
        again=undo,
        check=passed_nothing,
    )
    def _(world: World) -> None:
        take(world, Want("a", look_at=10), Want("b", look_at=10), settlements=world.ends(Action.ACK, "a2"), due=Due(10))

    @case(f"register another filter, {_mode}", lambda mode=_mode: outdated(mode), role="operator")
    def _(world: World) -> None:
        groups.register_options(ALIAS, G, "filter", {"region": ["eu", "gb"]}, actor="migrate")


def unclaimed() -> World:
    world = sequenced("shared")
    watermarks.create_missing(USING, G, "ab")
    return world


@case("claim, shared", unclaimed, again=undo, check=is_undone)
def _(world: World) -> None:
    take(world, Want("a", look_at=2), Want("b", look_at=10))


@case(
    "claim what a vanished subscriber held, shared",
    lambda: orphaned("shared"),
    again=undo,
    check=is_undone,
    dead=("a1",),
)
def _(world: World) -> None:
    take(world, due=Due(10))


@case("make what was lost again wait", lost_again, again=undo, check=is_undone, dead=("a1",))
def _(world: World) -> None:
    take(world, *(Want(key, due=tuple(at for name, at in world.places.items() if name[0] == key)) for key in "ab"))


@case(
    "make what was lost again wait, shared",
    lambda: lost_again("shared"),
    again=undo,
    check=is_undone,
    dead=("a1",),
)
def _(world: World) -> None:
    take(world, due=Due(10))


@case("undo a claim", claimed)
def _(world: World) -> None:
    claiming.undo(ALIAS, G, world.held["a1"].token)


# settling


def flush_case(name: str, setup: Callable[[], World], *ends: tuple[Any, ...], dead: tuple[str, ...] = ()) -> None:
    """``ends``: what becomes of which messages, and how."""
    fails = tuple(name for kind, names, _ in ends if kind is Action.NACK for name in names)

    @case(name, setup, dead=dead, fails=fails)
    def _(world: World) -> None:
        outcomes = [one for kind, names, options in ends for one in world.ends(kind, *names, **options)]
        settling.flush(ALIAS, G, outcomes, max_attempts=5, shared=world.mode == "shared", also="ab")


flush_case("flush acks at the head", claimed, (Action.ACK, ("a1", "a2", "b1"), {}))
flush_case("flush acks behind an unsettled message", claimed, (Action.ACK, ("a2", "a4", "b2"), {}))
flush_case("flush the ack that others wait for", acked_ahead, (Action.ACK, ("a1",), {}))
flush_case("flush nacks", claimed, (Action.NACK, ("a1", "b2"), {"delay_ms": 600_000, "error": "no"}))
flush_case("flush snoozes", claimed, (Action.SNOOZE, ("a1", "b2"), {"delay_ms": 600_000}))
flush_case("flush what never started", claimed, (Action.RELEASE, ("a3", "a4", "b2"), {}))
flush_case("flush a reject", claimed, (Action.REJECT, ("a1", "b1"), {"error": "no"}), dead=("a1", "b1"))
flush_case("flush last attempts", retried, (Action.NACK, ("a1", "b2"), {"error": "no"}), dead=("a1", "b2"))
MIXED = (
    (Action.ACK, ("a1", "b2"), {}),
    (Action.NACK, ("a2",), {"delay_ms": 600_000, "error": "no"}),
    (Action.REJECT, ("a3",), {"error": "no"}),
    (Action.RELEASE, ("a4",), {}),
    (Action.SNOOZE, ("b1",), {"delay_ms": 600_000}),
)
flush_case("flush all kinds", claimed, *MIXED, dead=("a3",))
flush_case("flush all kinds, shared", shared, *MIXED, dead=("a3",))


def abandoned() -> World:
    """A handler acked in its transaction; the process vanished before the watermark moved."""
    world = claimed()
    DeliveryState.objects.filter(consumer_group="g", message_offset=world.held["a1"].offset).update(acked=True)
    return world


@case("sweep", abandoned)
def _(world: World) -> None:
    watermarks.sweep(ALIAS, G, "ab")


@case("pass rows", abandoned)
def _(world: World) -> None:
    watermarks.pass_rows(ALIAS, G, "ab")


@case("put a start on record", claimed, fails=("a1",))
def _(world: World) -> None:
    settling.record_start(ALIAS, world.held["a1"])


@case("extend", shared)
def _(world: World) -> None:
    settling.extend(ALIAS, world.held["a1"], milliseconds=3_600_000, shared=True)


@case("extend all", shared)
def _(world: World) -> None:
    settling.extend_all(ALIAS, G, list(world.held.values()), milliseconds=3_600_000)


@case("ack in a transaction", claimed, again=None, unsure=True)
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="a1")
        settling.ack_here(ALIAS, world.held["a1"])


@case("settle in a transaction", claimed, again=None, unsure=True, dead=("b1",))
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="a1")
        settling.settle_here(ALIAS, [world.held["a1"], world.held["a2"]], [(world.held["b1"], "no")])


# GC


@case("collect", collectable, commits=None)
def _(world: World) -> None:
    with override_settings(MYSQLQUEUE={"RETENTION": 0}):
        garbage.collect(ALIAS)


# handlers and whole subscribers


def handle(world: World) -> None:
    """Runs everything in the inbox; outcomes that the commit left unknown are flushed with the rest."""
    assert world.sub is not None
    world.sub.work()
    world.sub.flush()


def resume(world: World) -> None:
    """What the poller does after a database error."""
    assert world.sub is not None
    world.sub.poller.reset()
    for work in world.sub.poller.groups:
        work.health.rests_until = 0.0  # after a turn that failed
    world.sub.heart.beat()
    world.sub.settle()


def carry_on(world: World) -> None:
    """A process that lives on needs nobody else, and no time-out to run out."""
    resume(world)
    assert lag() == 0


for _mode in ("ordered", "shared"):

    @case(
        f"an atomic handler, {_mode}",
        lambda mode=_mode: handed_out(mode),
        again=carry_on,
        commits=None,
        dead=("b1",),
        fails=("a2",),
        atomic=True,
    )
    def _(world: World) -> None:
        handle(world)

    @case(
        f"a subscriber's turn, {_mode}",
        lambda mode=_mode: subscribed(mode),
        again=carry_on,
        commits=None,
        dead=("b1",),
        fails=("a2",),
        atomic=True,
    )
    def _(world: World) -> None:
        assert world.sub is not None
        world.sub.step()


@case("a subscriber leaves", handed_out, again=resume, commits=None, dead=("b1",), fails=("a2",), atomic=True)
def _(world: World) -> None:
    assert world.sub is not None
    world.sub.work(1)
    world.sub.leave()


# outcomes that a turn could not write


def turn(world: World) -> None:
    """Writes what is to be written and claims what there is room for."""
    assert world.sub is not None
    world.sub.poller.groups[0].turn()


def carry_on_and_forget_nothing(*starts: str) -> Callable[[World], None]:
    """As ``carry_on``; in the end the handlers have been called with these, each so often."""

    def carry(world: World) -> None:
        carry_on(world)
        assert Counter(world.starts) == Counter(starts), "an outcome was lost, or written twice"

    return carry


FIVE = ("a1", "a2", "a3", "b1", "b2")
ALL_ENDS = {"a2": ("nack",), "b1": REJECT, "b2": ("snooze",)}
CALLS = (*FIVE, "a2", "b2")


KINDS: dict[str, Any] = {"dead": ("b1",), "fails": ("a2",)}
LIVES: dict[str, Any] = {"lives": True, **KINDS}

for _mode in ("ordered", "shared"):
    case(
        f"a turn that writes, {_mode}",
        lambda mode=_mode: finished(mode, ALL_ENDS, FIVE, atomic=False),
        again=carry_on_and_forget_nothing(*CALLS),
        **LIVES,
    )(turn)
    for _on_expiry, _letters in (("skip", ("b1",)), ("dead_letter", ("b1", "a3", "b2"))):
        case(
            f"a turn that ends what has expired, {_mode}, {_on_expiry}",
            lambda mode=_mode, what=_on_expiry: expiring(mode, ALL_ENDS, FIVE, atomic=False, on_expiry=what),
            again=carry_on_and_forget_nothing("a1", "a2", "a2", "b1"),
            lives=True,
            dead=_letters,
            fails=("a2",),
        )(turn)
    case(
        f"a turn that writes and claims, {_mode}",
        lambda mode=_mode: finished(mode, ALL_ENDS, FIVE, atomic=False, more=("a4", "b3")),
        again=carry_on_and_forget_nothing(*CALLS, "a4", "b3"),
        commits=None,
        **LIVES,
    )(turn)


def turns(world: World) -> None:
    """One writes the failure and gives back what was claimed behind it, the next one claims what may come now."""
    turn(world)
    turn(world)


def another_filter(mode: str) -> World:
    """As ``finished``; meanwhile a filter has been registered, and what it lets through has been published."""
    world = finished(mode, ALL_ENDS, FIVE, atomic=False)
    register_filter(US)
    more = [Message(name, key=name[0], id=name, metadata={"region": REGIONS[name]}) for name in ("a5", "a6", "b3")]
    publish_many(TOPIC, more)
    assert world.sub is not None
    world.sub.poller._poll()
    return world


for _mode in ("ordered", "shared"):
    case(
        f"a turn under outdated options, {_mode}",
        lambda mode=_mode: another_filter(mode),
        again=carry_on_and_forget_nothing(*CALLS, "a5", "b3"),
        commits=None,
        **LIVES,
    )(turns)


@case("the last flush", lambda: finished("ordered", ALL_ENDS, FIVE, atomic=False), **LIVES)
def _(world: World) -> None:
    assert world.sub is not None
    world.sub.flush()


# batches

BATCH = {"batch": True, "batch_size": 10}

case(
    "an atomic batch",
    lambda: handed_out("ordered", {"a2": ("nack",), "b1": REJECT}, FIVE, **BATCH),
    again=carry_on,
    commits=None,
    atomic=True,
    **KINDS,
)(handle)
case(
    "a turn after an atomic batch",
    lambda: finished("ordered", ALL_ENDS, FIVE, more=("a4", "b3"), **BATCH),
    again=carry_on_and_forget_nothing(*CALLS, "a4", "b3"),
    commits=None,
    atomic=True,
    **LIVES,
)(turn)
case(
    "a turn that dead-letters a batch",
    lambda: finished("ordered", {"a1": ("raise",)}, atomic=False, max_attempts=1, **BATCH),
    again=carry_on_and_forget_nothing("a1"),
    dead=("a1", "a2", "b1"),
    lives=True,
)(turn)


# strict order


def in_order(world: World, picture: Picture) -> None:
    """Nothing has started before what is before it had ended."""
    for key in "ab":
        starts = [name for name in world.starts if name[0] == key]
        assert starts == sorted(starts), "out of order"


def took_effect_in_order(world: World, picture: Picture) -> None:
    """A batch starts its messages together; what it has settled of a partition is a beginning of it."""
    for key in "ab":
        effects = Effect.objects.filter(name__startswith=key).order_by("id").values_list("name", flat=True)
        assert list(effects) == sorted(effects), "out of order"


FOUR = ("a1", "a2", "a3", "b1")


def strict(ends: Mapping[str, Sequence[str]], **options: Any) -> Callable[[], World]:
    """The head of partition a has failed."""
    return lambda: finished("ordered", ends, FOUR, atomic=False, on_failure="block", **options)


case(
    "a strict head fails",
    strict({"a1": ("raise", "raise")}, more=("a4",)),
    again=carry_on_and_forget_nothing("a1", "a1", *FOUR, "a4"),
    commits=None,
    fails=("a1",),
    lives=True,
    check=in_order,
)(turns)
case(
    "a strict head fails for good",
    strict({"a1": ("raise",)}, more=("a4",), max_attempts=1),
    again=carry_on_and_forget_nothing(*FOUR, "a4"),
    commits=None,
    dead=("a1",),
    check=in_order,
)(turns)
case(
    "a strict batch puts off its end",
    lambda: handed_out("ordered", {"a2": ("nack",), "a3": ("snooze",)}, FOUR, on_failure="block", **BATCH),
    again=carry_on,
    commits=None,
    fails=("a2",),
    atomic=True,
    check=took_effect_in_order,
)(handle)


def only_the_head(world: World, picture: Picture) -> None:
    """The head's backoff is not over, so nothing else of its partition has started."""
    assert [name for name in world.starts if name[0] == "a"] == ["a1"]


case(
    "a strict head waits",
    strict({"a1": ("wait",)}, more=("a4", "b2")),
    again=resume,
    commits=None,
    fails=("a1",),
    lives=True,
    check=only_the_head,
)(turns)


def put_off() -> World:
    """The head of partition a waits out a backoff; what was claimed behind it was given back."""
    world = claimed()
    world.strict = True
    flush(G, world.ends(Action.NACK, "a1", delay_ms=600_000) + world.ends(Action.RELEASE, "a2", "a3", "a4", "b2"))
    return world


def behind_nothing(world: World, picture: Picture) -> None:
    held = {name for (group, _, name), (_, _, who, *_) in picture.tables["state"].items() if group == "g" and who}
    assert held <= {"b1", "b2"}


@case("claim behind a head that waits", put_off, again=undo, check=behind_nothing)
def _(world: World) -> None:
    at = {name: one.offset for name, one in world.held.items()}
    take(world, Want("a", due=tuple(at[name] for name in ("a1", "a2", "a3", "a4"))), Want("b", due=(at["b2"],)))
