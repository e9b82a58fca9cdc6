"""The cases of debounced messages."""

from __future__ import annotations

from django.db import transaction

from django_mysqlqueue import publish, publish_many
from django_mysqlqueue.models import DebouncedMessage, OutboxMessage
from tests.app.models import Effect
from tests.crash.audit import Picture
from tests.crash.cases import case
from tests.crash.crashes import ALIAS, TOPIC
from tests.crash.worlds import World, messages, registered, sequenced
from tests.support.internals import debouncing, scheduling, sequencing

PAST = 5


def fits(world: World, picture: Picture) -> None:
    """Each debounced message has its row, and no row is without its message."""
    rows = {row.outbox_id: row.message_id for row in DebouncedMessage.objects.all()}
    outbox = {one.outbox_id: one.message_id for one in OutboxMessage.objects.exclude(deliver_at=0)}
    assert rows == {outbox_id: name for outbox_id, name in outbox.items() if name in {*rows.values(), "a8", "a9"}}


@case("publish a debounced message with a row", registered, role="scheduler", again=None, unsure=True, check=fits)
def _(world: World) -> None:
    with transaction.atomic(ALIAS):
        Effect.objects.using(ALIAS).create(name="order a9")
        publish(TOPIC, "a9", key="a", id="a9", coalesce="c", delay=600, using=ALIAS)


@case("publish debounced messages", registered, role="scheduler", again=None, unsure=True, check=fits)
def _(world: World) -> None:
    options = {"delay": 600, "max_delay": 900}
    both = [*messages("a8", coalesce="c", **options), *messages("a9", coalesce="d", **options)]
    publish_many(TOPIC, both, using=ALIAS)


def debounced() -> World:
    """Of three pairs, two are due in part, and of the third the longest wait is over."""
    world = sequenced()
    names = ("a5", "a6", "b5", "b6", "b7", "b8")
    for name, key in zip(names, "ccddee", strict=True):
        publish_many(TOPIC, messages(name, coalesce=key, delay=600, max_delay=900))
    for name, at in (("a5", PAST), ("b5", PAST), ("b6", PAST + 1), ("b7", PAST)):
        OutboxMessage.objects.filter(message_id=name).update(deliver_at=at)
    DebouncedMessage.objects.filter(message_id="b7").update(deliver_by=PAST + 2)
    return world


def replaced_earlier_ones(world: World, picture: Picture) -> None:
    """An earlier message is gone only if the later one is there, and keeps the time of both."""
    bounds = dict(DebouncedMessage.objects.values_list("message_id", "deliver_by"))
    there = {one for one, number in picture.messages.items() if number}
    for early, late in (("a5", "a6"), ("b5", "b6"), ("b7", "b8")):
        assert late in there
        assert picture.messages[late] == 1
        assert early in bounds or early not in there, f"{early} entered the log"
    if "b7" not in there:
        assert "b8" not in bounds, "the longest wait of b7 is over, and b8 waits"


@case("sequence debounced messages", debounced, cancels=("a5", "b5", "b7"), check=replaced_earlier_ones)
def _(world: World) -> None:
    sequencing.sequence(ALIAS)


def waiting() -> World:
    """A debounced message that waits."""
    world = sequenced()
    publish_many(TOPIC, messages("a6", coalesce="c", delay=600))
    return world


@case("cancel a debounced message", waiting, role="scheduler", cancels=("a6",), check=fits)
def _(world: World) -> None:
    scheduling.cancel("a6", topic=TOPIC, using=ALIAS)


@case("reschedule a debounced message", waiting, role="scheduler")
def _(world: World) -> None:
    scheduling.reschedule("a6", topic=TOPIC, delay=900, using=ALIAS)


def left_behind() -> World:
    """A debounced message that waits, and rows of two that plain SQL has cancelled."""
    world = waiting()
    kept = DebouncedMessage.objects.get()
    for one in (1, 2):
        DebouncedMessage.objects.create(
            outbox_id=kept.outbox_id + one, topic=TOPIC, partition_key="a", message_id=f"a{one}", coalesce_key="c"
        )
    return world


@case("collect debounced messages", left_behind)
def _(world: World) -> None:
    debouncing.collect(ALIAS)
