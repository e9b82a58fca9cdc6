"""The cases of messages with a coalesce key."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from django_mysqlqueue.models import CoalesceKey, DeliveryState, OutboxMessage, QueueMessage
from django_mysqlqueue.operations import dropping
from tests.crash.audit import Picture
from tests.crash.cases import FIVE, carry_on_and_forget_nothing, case, is_undone, take, turn, undo
from tests.crash.crashes import ALIAS, TOPIC
from tests.crash.worlds import LEASE_MS, WHO, G, World, flush, registered, sequenced, subscribed
from tests.support.harness import USING
from tests.support.internals import (
    Action,
    Due,
    Outcome,
    Settlement,
    Want,
    claiming,
    coalescing,
    heartbeats,
    leasing,
    run,
    sequencing,
    watermarks,
)
from tests.support.internals import superseding as superseding_messages

PASSES = (Outcome.EXPIRED, Outcome.SUPERSEDED)
KEYS = {"a1": "x", "a2": "y", "a3": "y", "a4": "x", "b1": "z", "b2": "z"}
"""The coalesce keys of messages, by name."""


def with_keys(model: type[QueueMessage | OutboxMessage], keys: Mapping[str, str] = KEYS) -> None:
    for name, key in keys.items():
        model.objects.filter(message_id=name).update(coalesce_key=key)


def coalesced(mode: str = "ordered") -> World:
    """A subscriber holds a1, and b1 has failed and is due. Of the others a4 and b2 have the same keys; a3 has a2's."""
    world = sequenced(mode)
    with_keys(QueueMessage, {"a1": "x", "b1": "z"})
    run(USING, lambda session: coalescing.follow(session, 0))
    heartbeats.beat(USING, WHO, [G], {})
    if mode == "ordered":
        leasing.acquire(USING, G, WHO, "ab", lease_ms=LEASE_MS)
    watermarks.create_missing(USING, G, "ab")
    wants = [Want("a", look_at=1), Want("b", look_at=1)]
    held = claiming.claim(USING, claiming.ClaimRequest(world.claimant(), wants, token=claiming.new_token())).deliveries
    first, failed = held
    flush(G, [Settlement(failed, Action.NACK, 0, "no")])
    with_keys(QueueMessage)
    run(USING, lambda session: coalescing.follow(session, 0))
    world.held = {"a1": first}
    world.places["b1"] = failed.offset
    return world


def passed_what_is_superseded(world: World, picture: Picture) -> None:
    """Both messages with one key are in flight at no time, and what was passed is superseded."""
    is_undone(world, picture)
    state = {row.message_offset: row for row in DeliveryState.objects.filter(consumer_group="g", acked=False)}
    for message in picture.rows.log.values():
        row = state.get(message.offset)
        if message.id == "a2":
            assert row is None, "a2 was claimed"
        if message.id == "a4" and world.mode == "shared":
            assert row is None or not row.delivery_token, "a4 was claimed although a1 is in flight"
        if message.offset <= picture.rows.offsets[G, message.key].claimed and message.id in ("a3", "a4", "b2"):
            assert row is not None, f"{message.id} was passed"


def superseding(mode: str) -> World:
    """What a subscriber has claimed is superseded before it starts: a1 by a3, and b1 by b2."""
    world = subscribed(mode, {}, FIVE, atomic=False)
    with_keys(OutboxMessage, {"a1": "x", "a3": "x", "b1": "z", "b2": "z"})
    assert world.sub is not None
    for group in world.sub.poller.groups:
        group.passes = False
    world.sub.step()
    world.sub.work()
    return world


def noted(*names: str) -> Callable[[World, Picture], None]:
    """Once something is given up, the message for which that was done is noted. (All of it or nothing has happened.)"""

    def check(world: World, picture: Picture) -> None:
        found = CoalesceKey.objects.filter(consumer_group="g", superseding_offset__gt=0)
        places = {row.offset: row.id for row in picture.rows.log.values()}
        assert {places[one.superseding_offset] for one in found} in (set(), set(names))

    return check


for _mode in ("ordered", "shared"):

    @case(
        f"claim that passes what is superseded, {_mode}",
        lambda mode=_mode: coalesced(mode),
        again=undo,
        check=passed_what_is_superseded,
        fails=("b1",),
    )
    def _(world: World) -> None:
        due = () if world.mode == "shared" else (world.places["b1"],)
        take(world, Want("a", look_at=2), Want("b", due=due, look_at=10), due=Due(10), passes=True)

    @case(
        f"claim that gives up a retry for a message that it does not claim, {_mode}",
        lambda mode=_mode: coalesced(mode),
        again=undo,
        check=noted("b2"),
        fails=("b1",),
    )
    def _(world: World) -> None:
        due = () if world.mode == "shared" else (world.places["b1"],)
        take(world, Want("b", due=due, look_at=0), due=Due(10), passes=True)

    @case(
        f"give up what is superseded at its start, {_mode}",
        lambda mode=_mode: coalesced(mode),
        check=noted("a4"),
        fails=("b1",),
    )
    def _(world: World) -> None:
        held = world.held["a1"]
        superseding_messages.give_up(ALIAS, G, lambda columns: None, {(held.key, held.offset): "x"})

    case(
        f"a turn that ends what is superseded, {_mode}",
        lambda mode=_mode: superseding(mode),
        again=carry_on_and_forget_nothing("a2", "a3", "b2"),
        lives=True,
    )(turn)


def to_be_sequenced() -> World:
    """Messages with keys are in the outbox, and others in the log."""
    world = registered()
    with_keys(OutboxMessage)
    sequencing.sequence(USING, max_rows=3)
    return world


@case("sequence messages with coalesce keys", to_be_sequenced)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


def forgotten() -> World:
    """Keys whose messages GC has deleted, and others."""
    world = sequenced()
    with_keys(QueueMessage)
    run(USING, lambda session: coalescing.follow(session, 0))
    CoalesceKey.objects.create(
        consumer_group="g", topic=TOPIC, partition_key="old", coalesce_key="c", message_offset=10**9
    )
    return world


def with_a_note() -> World:
    world = coalesced()
    run(USING, lambda session: coalescing.note(session, [(*G, "b", "z", 0, world.places["b1"])]))
    return world


@case(
    "drop a group with coalesce keys",
    with_a_note,
    role="operator",
    commits=None,
    rerun=True,
    forgets=(G,),
    fails=("b1",),
)
def _(world: World) -> None:
    dropping.drop(ALIAS, G, actor="test")


@case("collect coalesce keys", forgotten)
def _(world: World) -> None:
    coalescing.collect(ALIAS)
