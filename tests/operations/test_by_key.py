"""Operations on the messages of a key: of any priority, hashed or not."""

from __future__ import annotations

import io
import json
from functools import partial

import pytest
from django.core.management import call_command

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import DeliveryState, Operation, QueueMessage
from django_mysqlqueue.operations import retrying
from django_mysqlqueue.operations.limits import OperationLimits
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import DeadLetterFilter, matching_offsets
from tests.support.internals import Session as QueueSession
from tests.support.recorded_statements import _reads
from tests.support.scenarios import G

pytestmark = pytest.mark.usefixtures("db")

HASHED = {"TOPICS": {"t": {"PARTITIONS": 1}}}
"""With one partition, messages of all keys are in it."""
BOTH = pytest.mark.parametrize("options", [{}, HASHED], ids=["own partitions", "hashed"])


def published():
    """Messages of the keys a and b, and without a key: of three priorities."""
    publish_many(
        "t",
        [Message([key, rank], key=key, priority=rank) for rank in (0, 10, -10) for key in ("a", "b", None)],
    )
    sequence()


def failed():
    published()
    sub = Sub(handler(function=fail, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()


@pytest.fixture
def waiting():
    """Of each key, messages of three priorities that wait."""

    def start():
        published()
        sub = Sub(handler(function=lambda delivery: delivery.nack(3600, f"no {delivery.payload}"), mode="shared"))
        sub.settle()
        sub.leave()

    return start


def left(topic="t_dlq"):
    rows = QueueMessage.objects.filter(topic=topic).values_list("payload", flat=True)
    return sorted((json.loads(bytes(one)) for one in rows), key=str)


def due():
    """The payloads of the messages that are due."""
    offsets = DeliveryState.objects.filter(acked=False, invisible_until=0).values_list("message_offset", flat=True)
    rows = QueueMessage.objects.filter(offset__in=list(offsets)).values_list("payload", flat=True)
    return sorted((json.loads(bytes(one)) for one in rows), key=str)


def of(*keys, ranks=(-10, 0, 10)):
    return sorted(([key, rank] for key in keys for rank in ranks), key=str)


def run(name, *arguments):
    output = io.StringIO()
    call_command(name, *arguments, "--noinput", "--format", "json", stdout=output)
    return json.loads(output.getvalue())


# -- dead letters -----------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("name", "more"), [("redrive", {}), ("discard", {"reason": "of no use"})])
def test_dead_letters_of_a_key(settings, options, name, more):
    settings.MYSQLQUEUE = options
    failed()
    operation = partial(getattr(operations, name), "t", actor="ada", **more)
    assert operation(key="c", dry_run=True).planned == 0
    assert operation(key="", dry_run=True).planned == 0
    assert operation(key="a", dry_run=True).planned == 3
    assert operation(key="a", limit=1).changed == 1
    assert operation(key="a").changed == 2
    assert left() == of("b", None)
    records = Operation.objects.values_list("detail", "topic", "consumer_group")
    assert set(records) == {("key 'a'", "t_dlq", "")}


@BOTH
def test_other_conditions_hold_too(settings, options):
    settings.MYSQLQUEUE = options
    failed()
    redrive = partial(operations.redrive, "t", key="a", actor="ada")
    found = {tuple(json.loads(bytes(row.payload))): row.offset for row in QueueMessage.objects.filter(topic="t_dlq")}
    named = sorted([found["a", 0], found["b", 0]])
    assert redrive(error="no ['b'", dry_run=True).planned == 0
    assert redrive(group="g", error="10]", dry_run=True).planned == 2
    assert redrive(offsets=sorted(found.values()), dry_run=True).planned == 3
    assert redrive(group="g", error="-10]").changed == 1
    assert redrive(offsets=named).changed == 1
    assert list(Operation.objects.order_by("id").values_list("consumer_group", "detail")) == [
        ("g", "key 'a', error contains '-10]'"),
        ("", f"key 'a', offsets {named[0]}, {named[1]}"),
    ]


def test_messages_from_before_they_were_hashed_are_found(settings):
    failed()
    settings.MYSQLQUEUE = HASHED
    failed()
    assert operations.redrive("t", key="a", actor="ada").changed == 6


def test_a_job_and_its_task_are_one_condition():
    with pytest.raises(OperationRefused, match="key, task: pass one of them, since the key of a job is its task"):
        operations.redrive("t", key="a", task="a.b", actor="ada")


@pytest.mark.parametrize("key", [1, "x" * 191, "\ud800", "__p:1", "__p:+010:a"])
def test_what_is_no_key_is_refused(key):
    failed()
    for call in (
        partial(operations.redrive, "t"),
        partial(operations.discard, "t", reason="of no use"),
        partial(operations.retry, *G),
    ):
        with pytest.raises(OperationRefused, match="key"):
            call(key=key, actor="ada")


@pytest.mark.parametrize(("name", "more"), [("queueredrive", ()), ("queuediscard", ("--reason", "of no use"))])
def test_commands_on_dead_letters(name, more):
    failed()
    assert run(name, "t", "--key", "a", *more)["changed"] == 3
    assert left() == of("b", None)


def test_many_selected_ones_are_recorded_in_short():
    publish_many("t", (Message(number, key="a") for number in range(30)))
    sequence()
    Sub(handler(function=fail, max_attempts=1)).settle()
    sequence()
    offsets = list(QueueMessage.objects.filter(topic="t_dlq").order_by("offset").values_list("offset", flat=True))
    assert operations.redrive("t", offsets=offsets, actor="ada").changed == 30
    first = ", ".join(map(str, offsets[:20]))
    assert Operation.objects.get().detail == f"offsets {first} and 10 more"


# -- messages that wait for another attempt ------------------------------------------


@BOTH
def test_retry_of_a_key(settings, options, waiting):
    settings.MYSQLQUEUE = options
    waiting()
    retry = partial(operations.retry, *G, actor="ada")
    assert retry(key="a", dry_run=True).planned == 3
    assert retry(key="a", error="10]", dry_run=True).planned == 2
    assert retry(key="a", error="-10]").changed == 1
    assert retry(key="a").changed == 2
    assert due() == of("a")
    assert list(Operation.objects.order_by("id").values_list("detail", flat=True)) == [
        "key 'a', error contains '-10]'",
        "key 'a'",
    ]
    planned = retry(key="a", dry_run=True)
    assert planned.planned == 0
    assert planned.summary == ("No messages with the key “a” are waiting for another attempt in the group g/t.",)
    planned = retry(key="a", error="no", dry_run=True)
    assert planned.summary == ("No messages with the key “a” and an error that contains “no” are waiting.",)


@BOTH
def test_retry_of_a_key_of_named_messages(settings, options, waiting):
    settings.MYSQLQUEUE = options
    waiting()
    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    assert operations.retry(*G, key="a", offsets=offsets, actor="ada").changed == 3
    assert due() == of("a")
    assert Operation.objects.get().detail == f"key 'a', offsets {', '.join(map(str, offsets))}"


def test_retry_of_a_key_goes_through_small_pages_and_leaves_what_is_settled(waiting):
    publish_many("t", (Message(number, key="a") for number in range(7)))
    sequence()
    Sub(handler(mode="shared", function=lambda one: one.nack(3600) if one.payload % 2 == 0 else None)).settle()
    assert retrying.make_due(USING, G, key="a", actor="ada", limits=OperationLimits(rows=2)) == 4
    assert due() == [0, 2, 4, 6]


def test_the_command_retries_a_key(waiting):
    waiting()
    assert run("queueretry", *G, "--key", "a")["changed"] == 3
    assert due() == of("a")


# -- what it costs ---------------------------------------------------------------------


@pytest.mark.servers_only
def test_other_keys_are_not_read():
    number = 3000
    publish_many("t", (Message(one, key=f"k{one}") for one in range(number)))
    publish("t", number, key="a")
    sequence()
    QueueMessage.objects.update(topic="t_dlq", failed_group="g", original_topic="t")
    publish_many("t", (Message(one, key=f"k{one}") for one in range(number)))
    publish("t", number, key="a")
    sequence()
    Sub(handler(function=lambda delivery: delivery.nack(3600), mode="shared", prefetch=500)).settle(rounds=500)
    assert DeliveryState.objects.filter(acked=False).count() == number + 1
    before = _reads()
    wanted = DeadLetterFilter("t_dlq", key="a")
    assert [len(page) for page in matching_offsets(QueueSession(USING), wanted, size=100)] == [1]
    assert _reads() - before < 700
    before = _reads()
    assert operations.retry(*G, key="a", actor="ada", dry_run=True).planned == 1
    assert _reads() - before < 700
