"""Every operation of the service layer, ended at every statement that it sends.

What has happened is then all of it or nothing, a healthy subscriber handles
what is left, and nothing is lost, handled twice or left behind. A new operation
gets a case here; ``test_every_function_that_writes_has_a_case`` asks for it.
"""

from __future__ import annotations

import ast
import copy
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test import override_settings

from django_mysqlqueue import Message, publish, publish_many, service
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import DeliveryState, OutboxMessage, Sequencer, SubscriberHeartbeat
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service import (
    claiming,
    groups,
    heartbeats,
    leasing,
    publishing,
    retention,
    scheduling,
    sequencing,
    settling,
    watermarks,
)
from django_mysqlqueue.service.claiming import Claimant, Want
from django_mysqlqueue.service.deliveries import Claimed, Kind, Outcome
from django_mysqlqueue.service.groups import GroupRef
from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS, Clock
from tests.crash_audit import Observer, Picture, Snapshot, offsets
from tests.crashes import ALIAS, KILL, LOST, MODES, TOPIC, Ended, crashes
from tests.harness import USING, Sub, handler, lag, sequence

G = GroupRef("g", TOPIC)
OTHER = GroupRef("other", TOPIC)
"""A bystander: whatever is done to the other group changes nothing of this one's."""
NAMES = ("a1", "a2", "a3", "a4", "b1", "b2")
"""A message is its key and a number; it is its own id and payload."""
WHO = "operator"
LEASE_MS = 30_000


# -- what operations start from -----------------------------------------------


@dataclass
class World:
    """What a case starts from and keeps in memory."""

    mode: str = "ordered"
    held: dict[str, Claimed] = field(default_factory=dict)
    """What the subscriber has claimed."""
    places: dict[str, int] = field(default_factory=dict)
    """Message → its offset."""
    token: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    sub: Sub | None = None

    def claimant(self, who: str = WHO) -> Claimant:
        return Claimant(G, who, 5, 60_000 if self.mode == "shared" else None)

    def ends(self, kind: Kind, *names: str, **options: Any) -> list[Outcome]:
        return [Outcome(self.held[name], kind, **options) for name in names]


def messages(*names: str, **options: Any) -> list[Message]:
    return [Message(name, key=name[0], id=name, **options) for name in names]


def claim(ref: GroupRef, mode: str, who: str, keys: str = "ab") -> dict[str, Claimed]:
    """Takes everything there is, as a subscriber of that name."""
    heartbeats.beat(USING, who, [ref], {})
    if mode == "ordered":
        assert leasing.acquire(USING, ref, who, keys, lease_ms=LEASE_MS).held == set(keys)
    watermarks.create_missing(USING, ref, keys)
    claimant = Claimant(ref, who, 5, 60_000 if mode == "shared" else None)
    wants = [Want(key, look_at=10) for key in keys]
    found = claiming.claim(USING, claimant, wants, token=claiming.new_token()).deliveries
    bodies = claiming.bodies(USING, [delivery.offset for delivery in found])
    return {bodies[delivery.offset].message_id: delivery for delivery in found}


def flush(ref: GroupRef, outcomes: list[Outcome]) -> None:
    settling.flush(USING, ref, outcomes, max_attempts=5, shared=False)


def registered(mode: str = "ordered", names: tuple[str, ...] = NAMES) -> World:
    """Two groups and what has been published, not sequenced yet."""
    groups.register(USING, OTHER, mode="ordered", start="earliest")
    groups.register(USING, G, mode=mode, start="earliest")
    publish_many(TOPIC, messages(*names))
    return World(mode)


def sequenced(mode: str = "ordered") -> World:
    """The bystander has claimed partition a and acked its second message."""
    world = registered(mode)
    sequence()
    theirs = claim(OTHER, "ordered", "bystander", "a")
    flush(OTHER, [Outcome(theirs["a2"], Kind.ACK)])
    world.places = {name: delivery.offset for name, delivery in theirs.items()}
    return world


def claimed(mode: str = "ordered") -> World:
    """The subscriber holds everything."""
    world = sequenced(mode)
    world.held = claim(G, mode, WHO)
    return world


def shared() -> World:
    return claimed("shared")


def retried() -> World:
    """As ``claimed``, and all have used up their attempts but the one that now runs."""
    world = claimed()
    DeliveryState.objects.filter(consumer_group="g").update(retry_count=4)
    world.held = {name: one._replace(attempt=5) for name, one in world.held.items()}
    return world


def acked_ahead() -> World:
    """As ``claimed``; all but the first of partition a is acked, which the watermark cannot pass yet."""
    world = claimed()
    flush(G, world.ends(Kind.ACK, "a2", "a3"))
    return world


def leased() -> World:
    """The subscriber holds the leases; nothing is claimed."""
    world = sequenced()
    heartbeats.beat(USING, WHO, [G], {})
    leasing.acquire(USING, G, WHO, "ab", lease_ms=LEASE_MS)
    watermarks.create_missing(USING, G, "ab")
    return world


def orphaned(mode: str = "ordered") -> World:
    """Another has claimed everything and vanished; a1 has used up its attempts."""
    world = sequenced(mode)
    world.held = claim(G, mode, "vanished")
    world.places = {name: delivery.offset for name, delivery in world.held.items()}
    heartbeats.deregister(USING, "vanished", [G])
    DeliveryState.objects.filter(consumer_group="g").update(invisible_until=1)
    DeliveryState.objects.filter(consumer_group="g", message_offset=world.places["a1"]).update(retry_count=5)
    heartbeats.beat(USING, WHO, [G], {})
    return world


def inherited() -> World:
    """As ``orphaned``, and the subscriber has taken the leases."""
    world = orphaned()
    assert leasing.acquire(USING, G, WHO, "ab", lease_ms=LEASE_MS).held == {"a", "b"}
    return world


def drained() -> World:
    """Partition a is settled by the group; its lease is still there."""
    world = claimed()
    flush(G, world.ends(Kind.ACK, "a1", "a2", "a3", "a4"))
    return world


def collectable() -> World:
    """Partition a is settled by both groups, b by one."""
    world = drained()
    flush(G, world.ends(Kind.ACK, "b1", "b2"))
    theirs = claim_again(OTHER, "bystander")
    flush(OTHER, [Outcome(delivery, Kind.ACK) for delivery in theirs])
    return world


def claim_again(ref: GroupRef, who: str) -> list[Claimed]:
    """What the subscriber of that name holds, with the tokens that it has."""
    rows = DeliveryState.objects.filter(consumer_group=ref.group, delivered_by=who, acked=False)
    places = rows.values_list("partition_key", "message_offset", "delivery_token")
    return [Claimed(ref, key, offset, token, 1, suspect=False, size=2) for key, offset, token in places]


def scheduled() -> World:
    """What is due now, what has come due, a repeat of an id, and what waits."""
    world = sequenced()
    publish_many(TOPIC, messages("a5", "b3", "a1"))
    publish_many(TOPIC, messages("a6", "b4", delay=600))
    OutboxMessage.objects.filter(message_id="a6").update(deliver_at=1)
    return world


def flushed_database() -> World:
    """A test's flush has deleted the sequencer's row."""
    world = registered()
    Sequencer.objects.all().delete()
    return world


def subscribed(mode: str = "ordered") -> World:
    """A subscriber with an atomic handler that has not looked yet."""
    world = registered(mode, ("a1", "a2", "b1"))

    def act(delivery: Any) -> None:
        if delivery.payload == "b1":
            delivery.reject("no")
            return
        Effect.objects.using(ALIAS).create(name=delivery.payload)
        if delivery.payload == "a2" and delivery.attempt == 1:
            raise ValueError("the first attempt fails")

    world.sub = Sub(handler(function=act, mode=mode, atomic=True), using=ALIAS, name=WHO)
    return world


def handed_out(mode: str = "ordered") -> World:
    """As ``subscribed``, with everything in its inbox."""
    world = subscribed(mode)
    assert world.sub is not None
    world.sub.step()
    return world


# -- the cases ----------------------------------------------------------------


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
    forgets: bool
    """It forgets what the group has done."""
    check: Callable[[World, Picture], None] | None


CASES: dict[str, Case] = {}
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
    forgets: bool = False,
    check: Callable[[World, Picture], None] | None = None,
) -> Callable[[Callable[[World], object]], Callable[[World], object]]:
    """Adds a case. ``again``: the operation itself, unless another is given, or None."""

    def add(operation: Callable[[World], object]) -> Callable[[World], object]:
        then = operation if again is SAME else again
        assert name not in CASES
        CASES[name] = Case(
            name, setup, operation, then, commits, dead, (*dead, *fails), unsure, atomic, rerun, forgets, check
        )
        return operation

    return add


# publishing and sequencing


def is_there(world: World, picture: Picture) -> None:
    assert picture.messages["a9"] == picture.tables["effects"].count("order a9")


@case("publish with a row", registered, again=None, unsure=True, check=is_there)
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="order a9")
        publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)


@case("publish alone", registered, again=None, unsure=True)
def _(world: World) -> None:
    publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)


@case("publish and once more with the same id", sequenced, unsure=True, commits=None)
def _(world: World) -> None:
    publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)


@case("publish_many in chunks", registered, again=None, unsure=True)
def _(world: World) -> None:
    before, publishing.CHUNK_ROWS = publishing.CHUNK_ROWS, 2
    try:
        publish_many(TOPIC, messages("a7", "a8", "a9", "b9"), using=ALIAS)
    finally:
        publishing.CHUNK_ROWS = before


def is_not_there(world: World, picture: Picture) -> None:
    assert picture.messages["a9"] == picture.tables["effects"].count("order a9") == 0


@case("publish rolled back", registered, again=None, commits=None, check=is_not_there)
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="order a9")
        publish(TOPIC, "a9", key="a", id="a9", using=ALIAS)
        transaction.set_rollback(True, using=ALIAS)


@case("sequence", scheduled)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


@case("sequence without the mutex's row", flushed_database)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


@case("bring what is scheduled nearer", scheduled)
def _(world: World) -> None:
    scheduling.advance(ALIAS, 601_000)


# groups, heartbeats, leases


@case("register a group", sequenced, unsure=True)  # it reads the row after its transaction
def _(world: World) -> None:
    groups.register(ALIAS, GroupRef("new", TOPIC), mode="ordered", start="earliest")


@case("change a group's mode", sequenced)
def _(world: World) -> None:
    groups.set_mode(ALIAS, G, "shared", lease_ms=LEASE_MS)


@case("drop a group", acked_ahead, commits=None, rerun=True, forgets=True)
def _(world: World) -> None:
    groups.drop(ALIAS, G)


@case("beat", leased)
def _(world: World) -> None:
    heartbeats.beat(ALIAS, WHO, [G, GroupRef("g", "u")], {})


@case("deregister", claimed)
def _(world: World) -> None:
    heartbeats.deregister(ALIAS, WHO, [G])


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
    assert leasing.mine(ALIAS, G, WHO, "ab") == {"a", "b"}


@case("release", claimed)
def _(world: World) -> None:
    leasing.release(ALIAS, G, WHO, "ab")


@case("drop drained leases", drained)
def _(world: World) -> None:
    leasing.drop_drained(ALIAS, G, WHO, "ab")


@case("create offsets rows", sequenced)
def _(world: World) -> None:
    watermarks.create_missing(ALIAS, G, "ab")


# claims


def undo(world: World) -> None:
    claiming.undo(ALIAS, G, world.token)


def take(world: World, *wants: Want, **options: Any) -> None:
    world.token = claiming.new_token()
    claiming.claim(ALIAS, world.claimant(), wants, token=world.token, **options)


@case("claim", leased, again=undo)
def _(world: World) -> None:
    take(world, Want("a", look_at=2), Want("b", look_at=10))


@case("claim and flush", drained, again=undo, fails=("b2",))
def _(world: World) -> None:
    take(world, Want("a", look_at=2), outcomes=world.ends(Kind.ACK, "b1") + world.ends(Kind.NACK, "b2", error="no"))


@case("claim what a vanished subscriber held", inherited, again=undo, dead=("a1",))
def _(world: World) -> None:
    take(world, *(Want(key, due=tuple(at for name, at in world.places.items() if name[0] == key)) for key in "ab"))


def unclaimed() -> World:
    world = sequenced("shared")
    watermarks.create_missing(USING, G, "ab")
    return world


@case("claim, shared", unclaimed, again=undo)
def _(world: World) -> None:
    take(world, Want("a", look_at=2), Want("b", look_at=10))


@case("claim what a vanished subscriber held, shared", lambda: orphaned("shared"), again=undo, dead=("a1",))
def _(world: World) -> None:
    take(world, max_due=10)


@case("undo a claim", claimed)
def _(world: World) -> None:
    claiming.undo(ALIAS, G, world.held["a1"].token)


# settling


def flush_case(name: str, setup: Callable[[], World], *ends: tuple[Any, ...], dead: tuple[str, ...] = ()) -> None:
    """``ends``: what becomes of which messages, and how."""
    fails = tuple(name for kind, names, _ in ends if kind is Kind.NACK for name in names)

    @case(name, setup, dead=dead, fails=fails)
    def _(world: World) -> None:
        outcomes = [one for kind, names, options in ends for one in world.ends(kind, *names, **options)]
        settling.flush(ALIAS, G, outcomes, max_attempts=5, shared=world.mode == "shared", also="ab")


flush_case("flush acks at the head", claimed, (Kind.ACK, ("a1", "a2", "b1"), {}))
flush_case("flush acks behind an unsettled message", claimed, (Kind.ACK, ("a2", "a4", "b2"), {}))
flush_case("flush the ack that others wait for", acked_ahead, (Kind.ACK, ("a1",), {}))
flush_case("flush nacks", claimed, (Kind.NACK, ("a1", "b2"), {"delay_ms": 600_000, "error": "no"}))
flush_case("flush snoozes", claimed, (Kind.SNOOZE, ("a1", "b2"), {"delay_ms": 600_000}))
flush_case("flush what never started", claimed, (Kind.GIVE_BACK, ("a3", "a4", "b2"), {}))
flush_case("flush a reject", claimed, (Kind.REJECT, ("a1", "b1"), {"error": "no"}), dead=("a1", "b1"))
flush_case("flush last attempts", retried, (Kind.NACK, ("a1", "b2"), {"error": "no"}), dead=("a1", "b2"))
MIXED = (
    (Kind.ACK, ("a1", "b2"), {}),
    (Kind.NACK, ("a2",), {"delay_ms": 600_000, "error": "no"}),
    (Kind.REJECT, ("a3",), {"error": "no"}),
    (Kind.GIVE_BACK, ("a4",), {}),
    (Kind.SNOOZE, ("b1",), {"delay_ms": 600_000}),
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
        retention.collect(ALIAS)


# handlers and whole subscribers


def handle(world: World) -> None:
    """Runs everything in the inbox; outcomes that the commit left unknown are flushed with the rest."""
    assert world.sub is not None
    world.sub.work()
    world.sub.flush()


def resume(world: World) -> None:
    """What the poller does after a database error."""
    assert world.sub is not None
    world.sub.poller.start_anew()
    for work in world.sub.poller.works:
        work.rests_until = 0.0  # after a turn that failed
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


# -- running them -------------------------------------------------------------


@pytest.fixture(scope="module")
def crasher(_database, tmp_path_factory):
    if connection.vendor == "mysql" and "unix_socket" not in connection.settings_dict["OPTIONS"]:
        pytest.skip("the gate stands before a Unix socket")
    with crashes(tmp_path_factory.mktemp("gate")) as crasher:
        yield crasher


class Start:
    """A case's set-up: run once, then put back as it was."""

    def __init__(self, one: Case) -> None:
        self._setup = one.setup
        self.world = self._run()
        self._snapshot = Snapshot()
        self._observer = Observer()
        self.picture = self._observer.read()

    def _run(self) -> World:
        for model in (*QUEUE_MODELS, Effect):
            model.objects.all().delete()
        return self._setup()

    def again(self) -> tuple[World, Observer, Picture]:
        if self.world.sub is None:
            self._snapshot.restore()
            return self.world, copy.copy(self._observer), self.picture
        # What a subscriber has in its memory changes with what it does.
        world, observer = self._run(), Observer()
        picture = observer.read()
        assert picture.tables == self.picture.tables, "the set-up is not always the same"
        return world, observer, picture


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_ended_at_every_statement(db, crasher, name, mode):
    one = CASES[name]
    start = Start(one)
    assert not start.picture.broken
    one.operation(start.world)
    sessions.drop(connections[ALIAS])
    after = Observer().read()
    drained: list[Any] = []
    for number in itertools.count(1):
        try:
            ended = once(one, mode, number, crasher, start, after, drained)
        except BaseException as error:
            error.add_note(f"{name}, {mode}, statement {number}")
            raise
        if not ended.stopped:
            break
    assert number > 1 or mode == LOST


def once(one: Case, mode: str, number: int, crasher: Any, start: Start, after: Picture, drained: list[Any]) -> Ended:
    """One run that is stopped at a statement, and all that follows; ``drained``: what has been drained before."""
    world, observer, first = start.again()
    ended: Ended = crasher.run(mode, number, lambda: one.operation(world))
    if not ended.stopped and mode != KILL:
        assert ended.error is None
        return ended
    try:
        there = observer.read()
        check_step(one, mode, first, there)
        check_outcome(one, ended, there, first, after)
        then = one.again if mode != KILL else one.operation if one.rerun else None
        here = there
        if then is not None:
            then(world)
            sessions.drop(connections[ALIAS])
            here = observer.read()
            check_step(one, mode, there, here)
        if then is one.operation and one.commits == 1:
            assert here.tables == after.tables, "run again it has not come to the same"
        if one.check is not None:
            one.check(world, here)
        # The same rows come to the same end.
        if here.tables not in drained:
            done = drain(one, world)
            check_drained(one, world, here, observer.read(), done)
            drained.append(here.tables)
    except AssertionError as error:
        error.add_note("sent: " + "\n  ".join(text[:300] for text in ended.sent))
        error.add_note(f"raised: {ended.error!r}")
        raise
    return ended


def check_step(one: Case, mode: str, earlier: Picture, later: Picture) -> None:
    """What holds after anything at all."""
    assert not later.broken
    if not one.forgets:
        assert earlier.settled <= later.settled, "what was settled is not any more"
        never_back(earlier.offsets, later.offsets)
    assert all(count == 1 for count in later.letters.values()), "two dead letters of one message"
    for group, name in later.letters:
        assert (group, name) in later.settled, f"{name} is dead-lettered and still live for {group}"
        assert group == "g"
        assert name in one.dead
    # An atomic handler whose connection ends has failed.
    if mode == KILL or not one.atomic:
        for (group, name), count in later.failures.items():
            lost = count - earlier.failures.get((group, name), 0)
            assert lost <= 0 or (group == "g" and name in one.fails), f"{name} has lost an attempt"
    for group, name in later.settled - earlier.settled:
        assert name not in one.dead or group != "g" or later.letters[group, name], f"{name} is neither live nor dead"
    deleted = earlier.messages.keys() - later.messages.keys()
    assert all((group, name) in earlier.settled for name in deleted for group in ("g", "other"))
    if one.name != "collect":
        assert theirs(earlier) == theirs(later), "it has touched another group"


def theirs(picture: Picture) -> list[Any]:
    """The bystander's rows."""
    return [
        {place: row for place, row in picture.tables[table].items() if place[0] == "other"}
        for table in ("state", "offsets", "leases", "heartbeats")
    ]


def check_outcome(one: Case, ended: Ended, there: Picture, before: Picture, after: Picture) -> None:
    """What has happened is all of it or nothing, and what was reported is true."""
    if one.commits is None:
        return
    if ended.committed is None:
        assert there.tables in (before.tables, after.tables)
    else:
        assert there.tables == (after if ended.committed else before).tables
    if not ended.stopped:
        assert there.tables == after.tables, "it returned, and was undone"
    if ended.error is not None and not one.unsure and not isinstance(ended.error, CommitOutcomeUnknown):
        assert there.tables == before.tables, "it failed, and had been done"


Places = dict[tuple[str, str], tuple[int, int]]


def never_back(earlier: Places, later: Places) -> None:
    """Watermarks and cursors; a row may go with the last of its partition's messages."""
    for place in earlier.keys() & later.keys():
        assert later[place][0] >= earlier[place][0], f"the watermark of {place} went back"
        assert later[place][1] >= earlier[place][1], f"the cursor of {place} went back"


def drain(one: Case, world: World) -> list[tuple[str, str, int]]:
    """An hour later a healthy subscriber of both groups handles what there is; returns (group, message, attempt)."""
    done: list[tuple[str, str, int]] = []

    def note(delivery: Any) -> None:
        done.append((delivery.group, delivery.payload, delivery.attempt))
        if one.atomic and delivery.group == "g":
            Effect.objects.create(name=delivery.payload)

    known = groups.find(USING, G)
    handlers = (
        handler(function=note, mode=known.mode if known is not None else world.mode, atomic=one.atomic),
        handler(group="other", function=note),
    )
    clock = Clock()
    clock.advance(3700)
    try:
        marks: Places = {} if one.forgets else offsets()
        healthy = Sub(*handlers, lease_renewal_interval=0.0, name="healthy")
        quiet = 0
        while quiet < 2:
            before = len(done)
            healthy.step()
            healthy.work()
            healthy.flush()
            never_back(marks, marks := offsets())
            quiet = quiet + 1 if len(done) == before else 0
        for _ in healthy.poller.housekeeping._round():
            pass
        healthy.step()
    finally:
        clock.restore()
    return done


def check_drained(one: Case, world: World, there: Picture, end: Picture, done: list[tuple[str, str, int]]) -> None:
    """Each group has handled what it had not settled, once, in order; nothing is left."""
    assert not end.broken
    handled = Counter((group, name) for group, name, _ in done)
    for group in ("g", "other"):
        for name in end.messages.keys() | there.messages.keys():
            settled = (group, name) in there.settled and not (one.forgets and group == "g")
            letters = end.letters[group, name] - there.letters[group, name]
            assert handled[group, name] + letters == (not settled), f"{name} by {group}"
        if world.mode == "ordered" or group == "other":
            for key in "ab":
                order = [name for by, name, _ in done if by == group and name[0] == key]
                assert order == sorted(order), "out of order"
    for group, name, attempt in done:
        failed = 0 if one.forgets else there.failures.get((group, name), 0)
        assert attempt == failed + 1, f"{name} has lost an attempt"
    assert all(count == 1 for count in end.messages.values())
    assert all(count == 1 for count in end.letters.values())
    assert {name for _, name in end.letters} <= set(one.dead)
    assert not end.tables["outbox"]
    assert not end.tables["state"]
    assert not end.tables["leases"]
    for (group, key), (watermark, cursor) in end.offsets.items():
        assert watermark == cursor, f"{group} has not passed all of {key}"
    if one.atomic:
        effects = Counter(end.tables["effects"])
        for name in end.messages:
            assert effects[name] + end.letters["g", name] == 1, f"{name} took effect {effects[name]} times"


# -- nothing is left out ------------------------------------------------------


def writing_functions() -> set[str]:
    """The functions of the service layer that execute a statement or open a transaction."""
    found: set[str] = set()

    def visit(node: ast.AST, module: str, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = "" if isinstance(child, ast.ClassDef) else ".<locals>"
                visit(child, module, f"{path}{child.name}{inside}.")
            else:
                if isinstance(child, ast.Call) and writes(child):
                    found.add(f"{module}.{path.removesuffix('.').removesuffix('.<locals>')}")
                visit(child, module, path)

    for file in Path(service.__path__[0]).glob("*.py"):
        if file.stem != "transactions":  # how all of them do it
            visit(ast.parse(file.read_text()), file.stem, "")
    return found


def writes(call: ast.Call) -> bool:
    """``session.execute(…)``, ``run(…)``, or what a query set does: unlike a dict's, its ``update`` takes keywords."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "run"
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    if name == "update":
        return bool(call.keywords)
    if name == "delete":
        return not call.args
    return name in ("execute", "create", "bulk_create", "save", "get_or_create", "update_or_create")


def test_every_function_that_writes_has_a_case(db, crasher):
    seen: set[str] = set()
    folder = str(Path(service.__path__[0]))

    def watch(execute, sql, params, many, context):
        frame = sys._getframe()
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(folder):
                seen.add(f"{Path(code.co_filename).stem}.{code.co_qualname}")
            frame = frame.f_back
        return execute(sql, params, many, context)

    required = writing_functions()
    assert {"settling.flush", "groups.drop", "groups.set_mode.<locals>.change", "dead_letters.dead_letter"} <= required
    for one in CASES.values():
        world = Start(one).world
        with connections[ALIAS].execute_wrapper(watch):
            one.operation(world)
    assert required - seen == set()
