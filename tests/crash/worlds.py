"""What the operations start from that the crash harness ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    Sequencer,
)
from django_mysqlqueue.operations import group_settings
from django_mysqlqueue.operations.group_settings import Difference
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import NO_KEY, NO_LIMITS, DeliveryLimits, Rate
from tests.app.models import Effect
from tests.crash.crashes import TOPIC
from tests.support import refusing
from tests.support.claims import claimant_of
from tests.support.filtering import EU, LONG_AGO, US
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import (
    NO_WAIT,
    Action,
    Claimant,
    Claimed,
    Due,
    GroupRef,
    Holding,
    OptionColumns,
    Session,
    Settlement,
    Want,
    claiming,
    groups,
    heartbeats,
    leasing,
    payloads,
    settling,
    slots,
    watermarks,
)

G = GroupRef("g", TOPIC)
OTHER = GroupRef("other", TOPIC)
"""A bystander: whatever is done to the other group changes nothing of this one's."""
NAMES = ("a1", "a2", "a3", "a4", "b1", "b2")
"""A message is its key and a number; it is its own id and payload."""
WHO = "operator"
LEASE_MS = 30_000


@dataclass
class World:
    """What a case starts from and keeps in memory."""

    mode: str = "ordered"
    held: dict[str, Claimed] = field(default_factory=dict)
    """What the subscriber has claimed."""
    places: dict[str, int] = field(default_factory=dict)
    """Message → its offset."""
    token: int = 0
    sub: Sub | None = None
    backoff: Backoff = NO_WAIT
    limits: DeliveryLimits = NO_LIMITS
    filter: FilterPolicy | None = None
    options: OptionColumns | None = None
    """The columns of the group row that its claims are made under."""
    strict: bool = False
    """Nothing of a partition starts before what is before it has ended."""
    stored: dict[str, int] = field(default_factory=dict)
    """The slots that the subscriber's rows say it holds."""
    starts: list[str] = field(default_factory=list)
    """What the subscriber's handlers were called with, as far as this process knows."""

    def claimant(self, who: str = WHO) -> Claimant:
        return claimant_of(
            G,
            who,
            5,
            60_000 if self.mode == "shared" else None,
            on_failure="block" if self.strict else "skip",
            backoff=self.backoff,
            filter=self.filter,
            options=self.options,
        )

    def holding(self, held: Mapping[str, int] | None = None, **more: Any) -> Holding:
        """What the subscriber holds; ``more``: fields of ``Holding``."""
        return Holding(WHO, self.limits, LEASE_MS, held or {}, **more)

    def take_all(self, holding: Holding | None = None) -> dict[str, Claimed]:
        """Claims what there is, and what there are slots for."""
        wants = [Want(key, look_at=10) for key in "ab"]
        self.token = claiming.new_token()
        request = claiming.ClaimRequest(self.claimant(), wants, token=self.token, due=Due(10), holding=holding)
        found = claiming.claim(USING, request)
        self.stored = found.flushed.held or {}
        contents = payloads.read(USING, [delivery.offset for delivery in found.deliveries])
        return {contents[delivery.offset].message_id: delivery for delivery in found.deliveries}

    def ends(self, kind: Action, *names: str, **options: Any) -> list[Settlement]:
        return [Settlement(self.held[name], kind, **options) for name in names]


def messages(*names: str, **options: Any) -> list[Message]:
    return [Message(name, key=name[0], id=name, **options) for name in names]


def claim(ref: GroupRef, mode: str, who: str, keys: str = "ab") -> dict[str, Claimed]:
    """Takes everything there is, as a subscriber of that name."""
    heartbeats.beat(USING, who, [ref], {})
    if mode == "ordered":
        assert leasing.acquire(USING, ref, who, keys, lease_ms=LEASE_MS).held == set(keys)
    watermarks.create_missing(USING, ref, keys)
    claimant = claimant_of(ref, who, 5, 60_000 if mode == "shared" else None)
    wants = [Want(key, look_at=10) for key in keys]
    found = claiming.claim(USING, claiming.ClaimRequest(claimant, wants, token=claiming.new_token())).deliveries
    contents = payloads.read(USING, [delivery.offset for delivery in found])
    return {contents[delivery.offset].message_id: delivery for delivery in found}


def flush(ref: GroupRef, outcomes: list[Settlement]) -> None:
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
    flush(OTHER, [Settlement(theirs["a2"], Action.ACK)])
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


LIMITS = DeliveryLimits(
    rate=Rate(9000, "s"),
    rate_per_key=Rate(1, "h"),
    burst=1,
    max_in_flight=9,
    max_in_flight_per_key=3,
    limit_by="tenant",
)


def limited(mode: str = "ordered") -> World:
    """Another holds a slot. Messages of partition a have two tenants; the group itself is not registered as limited."""
    world = leased() if mode == "ordered" else sequenced(mode)
    watermarks.create_missing(USING, G, "ab")
    world.limits = LIMITS
    heartbeats.beat(USING, "bystander", [G], {})
    with_slot = Holding("bystander", LIMITS, LEASE_MS, {NO_KEY: 1, ":x": 1})
    groups.run(USING, lambda session: slots.store_held(session, G, with_slot, with_slot.held))
    for tenant, name in (("x", "a1"), ("x", "a2"), ("y", "a3"), ("y", "b1")):
        QueueMessage.objects.filter(message_id=name).update(metadata={"tenant": tenant})
    return world


def holding() -> World:
    """As ``limited``; the subscriber has claimed what it got slots for."""
    world = limited("shared")
    heartbeats.beat(USING, WHO, [G], {})
    world.held = world.take_all(world.holding())
    return world


REGIONS = {"a1": "asia", "a2": "eu", "a3": "asia", "a5": "us", "a6": "eu", "b1": "eu", "b3": "us"}
"""What the metadata of messages says; the others have none."""


def filtered(mode: str = "ordered", more: tuple[str, ...] = ()) -> World:
    """A group with a filter, which a2, a6 and b1 match, and which b2 bypasses. ``more`` are behind the others."""
    if mode == "ordered":
        world = leased()
    else:
        world = sequenced(mode)
        watermarks.create_missing(USING, G, "ab")
    publish_many(TOPIC, messages(*more))
    sequence()
    for name, region in REGIONS.items():
        QueueMessage.objects.filter(message_id=name).update(metadata={"region": region})
    QueueMessage.objects.filter(message_id="b2").update(target_group="g")
    world.filter = EU
    register_filter(EU)
    world.options = groups.group_controls(Session(USING), [G])[G].options
    return world


def expired(mode: str = "ordered", more: tuple[str, ...] = ()) -> World:
    """Some messages of a group without a filter have expired: a1, a2 and b2, and those of ``more``."""
    world = filtered(mode, more)
    QueueMessage.objects.update(metadata={})
    QueueMessage.objects.filter(message_id__in=("a1", "a2", "b2", *more)).update(expires_at=LONG_AGO)
    ConsumerGroup.objects.filter(consumer_group="g").update(filter={})
    world.filter, world.options = None, None
    return world


def expiring(mode: str = "ordered", *args: Any, **options: Any) -> World:
    """As ``finished``, and a3 and b2 had expired when they were to be started."""
    world = subscribed(mode, *args, **options)
    OutboxMessage.objects.filter(message_id__in=("a3", "b2")).update(expires_at=LONG_AGO)
    assert world.sub is not None
    world.sub.step()
    world.sub.work()
    return world


def outdated(mode: str = "ordered") -> World:
    """The subscriber has claimed what matches the filter. Another was registered since, and messages have come."""
    world = filtered(mode)
    world.held = world.take_all()
    more = ("a5", "a6", "b3")
    publish_many(TOPIC, [Message(name, key=name[0], id=name, metadata={"region": REGIONS[name]}) for name in more])
    sequence()
    register_filter(US)
    return world


def register_filter(policy: FilterPolicy) -> None:
    ConsumerGroup.objects.filter(consumer_group="g").update(filter=policy.as_json())


def acked_ahead() -> World:
    """As ``claimed``; all but the first of partition a is acked, which the watermark cannot pass yet."""
    world = claimed()
    flush(G, world.ends(Action.ACK, "a2", "a3"))
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


def lost_again(mode: str = "ordered") -> World:
    """Another has claimed suspects, recorded their starts, and vanished; a1 has used up its attempts."""
    world = orphaned(mode)
    DeliveryState.objects.filter(consumer_group="g").exclude(delivery_token=0).update(suspect=True)
    DeliveryState.objects.filter(consumer_group="g", retry_count=0).update(retry_count=1)
    world.backoff = Backoff(initial=1000, jitter=0)
    if mode == "ordered":
        assert leasing.acquire(USING, G, WHO, "ab", lease_ms=LEASE_MS).held == {"a", "b"}
    return world


def drained() -> World:
    """Partition a is settled by the group; its lease is still there."""
    world = claimed()
    flush(G, world.ends(Action.ACK, "a1", "a2", "a3", "a4"))
    return world


def collectable() -> World:
    """Partition a is settled by both groups, b by one."""
    world = drained()
    flush(G, world.ends(Action.ACK, "b1", "b2"))
    theirs = claim_again(OTHER, "bystander")
    flush(OTHER, [Settlement(delivery, Action.ACK) for delivery in theirs])
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


def refused() -> World:
    """The log refuses one message that is due now, and one that has come due."""
    world = sequenced()
    bad = {name: Message(refusing.PAYLOAD, key=name[0], id=name) for name in ("a8", "b4")}
    publish_many(TOPIC, [*messages("a5"), bad["a8"], *messages("a7", "b3")])
    publish_many(TOPIC, [bad["b4"], *messages("b5")])
    OutboxMessage.objects.filter(message_id__in=("b4", "b5")).update(deliver_at=1)
    return world


def quarantined() -> World:
    """As ``refused``, after a pass of the sequencer. The log would take one of the two messages by now."""
    world = refused()
    sequence()
    QuarantinedMessage.objects.filter(message_id="a8").update(payload=b'"a8"')
    return world


def flushed_database() -> World:
    """A test's flush has deleted the sequencer's row."""
    world = registered()
    Sequencer.objects.all().delete()
    return world


REJECT = ("reject",) * 9
ENDS = {"a2": ("raise",), "b1": REJECT}
"""What becomes of a message when it is started for the first, the second, … time; then it is acked."""


def subscribed(
    mode: str = "ordered",
    ends: Mapping[str, Sequence[str]] = ENDS,
    names: tuple[str, ...] = ("a1", "a2", "b1"),
    *,
    atomic: bool = True,
    **options: Any,
) -> World:
    """A subscriber that has not looked yet. An atomic handler writes what it has acked."""
    world = registered(mode, names)
    world.strict = options.get("on_failure") == "block"

    def act(delivery: Any) -> None:
        assert world.sub is not None
        name = delivery.payload
        end = ends.get(name, ())[world.starts.count(name) :][:1]
        world.starts.append(name)
        match end:
            case ("nack",):
                delivery.nack(reason="no")
            case ("wait",):
                delivery.nack(600, reason="not yet")
            case ("snooze",):
                delivery.snooze(0)
            case ("reject",):
                delivery.reject("no")
            case _:
                if atomic:
                    Effect.objects.using(world.sub.using).create(name=name)
                if end:
                    raise ValueError("no")

    def act_on_all(deliveries: Any) -> None:
        for delivery in deliveries:
            act(delivery)

    function = act_on_all if options.get("batch") else act
    world.sub = Sub(handler(function=function, mode=mode, atomic=atomic, **options), name=WHO)
    return world


def handed_out(mode: str = "ordered", *args: Any, **options: Any) -> World:
    """As ``subscribed``, with everything in its inbox."""
    world = subscribed(mode, *args, **options)
    assert world.sub is not None
    world.sub.step()
    return world


def finished(mode: str = "ordered", *args: Any, more: tuple[str, ...] = (), **options: Any) -> World:
    """As ``handed_out``, and the handlers have run: what came of it is to be written, and ``more`` to be claimed."""
    world = handed_out(mode, *args, **options)
    assert world.sub is not None
    world.sub.work()
    if more:
        publish_many(TOPIC, messages(*more))
        world.sub.poller._poll()
    return world


def overriding(using: str, values: Mapping[str, object], unset: Sequence[str], *, actor: str) -> Difference:
    """An operator overrides options of the group."""
    return group_settings.override(using, G, lambda _: (values, unset), check=lambda found: None, actor=actor)
