"""A row of the outbox that the log refuses goes to the quarantine, alone, and the log goes on."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish, publish_many, subscriber
from django_mysqlqueue.exceptions import OperationRefused, QueueError
from django_mysqlqueue.inspection import check_health, find_causes, find_problems, queue_problems
from django_mysqlqueue.models import ConsumerGroup, Operation, OutboxMessage, QuarantinedMessage, QueueMessage
from django_mysqlqueue.operations import quarantine as quarantine_operations
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.testing import deliver_all
from tests.support import refusing as refusals
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import quarantine, sequencing

pytestmark = pytest.mark.usefixtures("db")


@pytest.fixture
def refusing(db):
    """A trigger of a user on the log, which refuses the payload ``"bad"``."""
    with refusals.refusing():
        yield


def contents(model):
    return [bytes(one) for one in model.objects.order_by("pk").values_list("payload", flat=True)]


@pytest.mark.promise("Quarantine")
@pytest.mark.parametrize("places", [(0,), (3,), (9,), (0, 1, 9), tuple(range(10))])
@pytest.mark.parametrize("delay", [0, 0.001])
def test_only_the_rows_that_the_log_refuses_are_set_aside(refusing, places, delay):
    values = ["bad" if n in places else n for n in range(10)]
    publish_many("t", [Message(one, key=f"k{n % 2}", delay=delay) for n, one in enumerate(values)])
    while not QueueMessage.objects.exists() and OutboxMessage.objects.exists():
        done = sequencing.sequence(USING)
    assert (done.moved, done.quarantined) == (10, len(places))
    assert contents(QueueMessage) == [b"%d" % n for n in range(10) if n not in places]
    assert not OutboxMessage.objects.exists()
    assert contents(QuarantinedMessage) == [b'"bad"'] * len(places)
    one = QuarantinedMessage.objects.first()
    assert "no bad ones" in one.reason
    assert one.quarantined_at > 0
    publish("t", "next")
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.payload))).settle()
    assert sorted(map(str, got)) == sorted([*(str(n) for n in range(10) if n not in places), "next"])


def test_the_quarantine_has_all_columns_of_the_row(refusing):
    publish("t", "bad", key="a", id="i", priority=7, expires_in=1000, coalesce="c", metadata={"m": 1})
    before = OutboxMessage.objects.values().get()
    sequence()
    after = QuarantinedMessage.objects.values().get()
    assert before.pop("outbox_id")
    assert {name: after[name] for name in before} == before


def test_a_pass_without_such_rows_sends_no_further_statement(refusing):
    publish("t", 1)
    with CaptureQueriesContext(connection) as captured:
        sequencing.sequence(USING)
    assert not [one["sql"] for one in captured.captured_queries if "SAVEPOINT" in one["sql"]]


def test_another_error_sets_nothing_aside(refusing, monkeypatch):
    publish_many("t", ["bad", 1])

    def fail(*arguments, **options):
        raise OperationalError(1114, "The table 'queue_messages' is full")

    monkeypatch.setattr(sequencing, "_append", fail)
    with pytest.raises(OperationalError):
        sequencing.sequence(USING)
    assert OutboxMessage.objects.count() == 2
    assert not QuarantinedMessage.objects.exists()


@pytest.fixture
def row(refusing):
    """A message in the quarantine, whose cause has been fixed."""
    publish("t", "bad", key="a", id="i")
    sequence()
    refusals.stop()
    return QuarantinedMessage.objects.get().pk


def test_a_message_is_requeued(row):
    planned = operations.requeue_quarantined([row, row + 1], actor="me", dry_run=True)
    assert (planned.planned, planned.changed, OutboxMessage.objects.count()) == (1, 0, 0)
    done = operations.requeue_quarantined([row, row + 1], actor="me", reason="fixed")
    assert (done.changed, done.summary) == (1, ("Messages moved back into the outbox: 1.",))
    assert not QuarantinedMessage.objects.exists()
    assert Operation.objects.values_list("action", "changed", "actor", "reason").get() == ("requeue", 1, "me", "fixed")
    got = []
    Sub(handler(function=lambda delivery: got.append((delivery.payload, delivery.key, delivery.id)))).settle()
    assert got == [("bad", "a", "i")]
    with pytest.raises(OperationRefused, match="None of these messages is in the quarantine"):
        operations.requeue_quarantined([row], actor="me")


def test_a_requeued_message_supersedes_none_that_came_meanwhile(refusing):
    publish("t", "bad", key="k", coalesce="c")
    publish("t", "newer", key="k", coalesce="c")
    sequence()
    refusals.stop()
    operations.requeue_quarantined([QuarantinedMessage.objects.get().pk], actor="me")
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.payload))).settle()
    assert got == ["newer", "bad"]


@pytest.mark.parametrize("refused", [False, True])
def test_debounced_messages_enter_the_log_in_the_order_of_their_times(db, clock, refused):
    """A debounced message may enter the log earlier than at its own time."""
    publish("t", "a1", key="k", coalesce="a", delay=20, max_delay=20)
    publish("t", "other", key="k", delay=30)
    publish("t", "bad" if refused else "good", key="z", delay=40)
    publish("t", "a2", key="k", coalesce="a", delay=60, max_delay=60)
    clock.advance(100)
    with refusals.refusing():
        sequence()
    assert contents(QueueMessage) == [b'"a2"', b'"other"', *([] if refused else [b'"good"'])]


def test_a_pass_looks_for_them_among_a_bounded_number_of_rows(refusing, monkeypatch):
    monkeypatch.setattr(sequencing, "ISOLATED_ROWS", 4)
    publish_many("t", ["bad", *range(9)])
    passes = [sequencing.sequence(USING) for _ in range(2)]
    assert [(done.moved, done.quarantined, done.more) for done in passes] == [(4, 1, True), (6, 0, False)]


def test_a_message_that_the_outbox_refuses_stays(row):
    QuarantinedMessage.objects.update(deliver_at=-1)
    with pytest.raises(OperationRefused, match="deliver_at_from_0_to_year_9999"):
        operations.requeue_quarantined([row], actor="me")
    assert QuarantinedMessage.objects.count() == 1


def test_a_message_is_deleted(row):
    assert operations.delete_quarantined([row], actor="me").changed == 1
    assert not QuarantinedMessage.objects.exists()
    assert not OutboxMessage.objects.exists()
    assert Operation.objects.get().action == "delete quarantined"


def test_nothing_else_deletes_it(row, clock):
    clock.advance(400 * 86_400)
    call_command("queuegc", stdout=io.StringIO())
    assert QuarantinedMessage.objects.count() == 1


@pytest.mark.promise("Health")
def test_it_is_a_problem(row):
    found = [one for one in find_problems() if one.kind == "quarantined"]
    assert [(one.severity, one.topic, one.message_id, one.messages.value) for one in found] == [(0, "t", "i", 1)]
    assert "The log has refused 1 message of topic 't', which is in the quarantine: message 'i'," in found[0].text
    assert "no bad ones" in found[0].error


def test_each_topic_is_a_problem(db, monkeypatch):
    monkeypatch.setattr(queue_problems, "QUARANTINED", 2)
    for topic in ("u", "t", "t", "t", "t_dlq", "u@queue"):
        QuarantinedMessageFactory(topic=topic)
    found = [(one.topic, str(one.messages)) for one in find_problems() if one.kind == "quarantined"]
    assert found == [("t", "2+"), ("t_dlq", "1"), ("u", "1"), ("u@queue", "1")]
    (cause,) = [one for one in find_causes() if one.kind == "quarantined"]
    assert cause.text.startswith("The log has refused messages of 4 topics: t, t_dlq, u and 1 more")


@pytest.mark.promise("Health")
def test_health_of_a_topic_is_about_its_own_messages(db):
    Sub(*(handler(topic) for topic in "tuv"))
    for topic in ("u", "v_dlq", "w@queue"):
        QuarantinedMessageFactory(topic=topic)

    def found(**selected):
        return [one.topic for one in check_health(**selected).findings if one.kind == "quarantined"]

    assert found() == ["u", "v_dlq", "w@queue"]
    assert (found(topics=["t"]), found(topics=["u"]), found(topics=["v"])) == ([], ["u"], ["v_dlq"])
    assert found(groups=["g"]) == ["u", "v_dlq"]
    ConsumerGroup.objects.create(consumer_group="g", topic="w", mode="shared")
    assert found(topics=["w"]) == ["w@queue"], "on its way to another database"


def run_command(*arguments, name="queuequarantine"):
    output = io.StringIO()
    call_command(name, *arguments, stdout=output, no_color=True)
    return output.getvalue()


def test_the_command(row):
    listed = run_command()
    assert all(text in listed for text in (str(row), "t", "a", "i", "no bad ones"))
    assert json.loads(run_command("--format", "json"))["quarantined"][0]["message_id"] == "i"
    assert "Nothing was changed (--dry-run)." in run_command("--requeue", str(row), "--dry-run")
    assert "Messages moved back into the outbox: 1." in run_command("--requeue", str(row), "--noinput")
    assert run_command() == "The quarantine is empty.\n"
    with pytest.raises(CommandError, match="require --requeue or --delete"):
        run_command("--dry-run")


@pytest.mark.parametrize(
    ("option", "done", "moved"),
    [
        ("--requeue", "Messages moved back into the outbox: 3.", 3),
        ("--delete", "Messages deleted from the quarantine: 3.", 0),
    ],
)
def test_the_command_on_a_topic(db, monkeypatch, option, done, moved):
    monkeypatch.setattr(quarantine_operations, "LIMITS", OperationLimits(dead_letters=2))
    Sub(handler("t")).step()
    for topic in ("t", "u", "t", "t"):
        QuarantinedMessageFactory(topic=topic)
    listed = json.loads(run_command("--topic", "t", "--format", "json"))["quarantined"]
    assert [one["topic"] for one in listed] == ["t"] * 3
    previewed = run_command("--topic", "t", option, "--dry-run")
    assert "3" in previewed
    assert "Nothing was changed (--dry-run)." in previewed
    assert QuarantinedMessage.objects.count() == 4
    assert done in run_command("--topic", "t", option, "--noinput")
    assert list(QuarantinedMessage.objects.values_list("topic", flat=True)) == ["u"]
    assert OutboxMessage.objects.filter(topic="t").count() == moved
    assert list(Operation.objects.order_by("id").values_list("topic", "changed")) == [("t", 2), ("t", 1)]
    assert run_command("--topic", "t") == "The quarantine has no messages of topic 't'.\n"
    for arguments, said in (
        (("--topic", "t", option), "The quarantine has no messages of topic 't'"),
        (("--topic", "typo", option), "There is no topic 'typo'"),
        (("--topic", "typo"), "There is no topic 'typo'"),
        ((option,), "rows or topic: pass exactly one of them"),
        (("--topic", "u", option, "1"), "rows or topic: pass exactly one of them"),
    ):
        with pytest.raises(CommandError, match=said):
            run_command(*arguments)


def test_messages_that_are_refused_meanwhile_are_not_requeued_for_ever(db, monkeypatch):
    monkeypatch.setattr(quarantine_operations, "LIMITS", OperationLimits(dead_letters=1))
    QuarantinedMessageFactory.create_batch(2)
    real = quarantine.requeue

    def requeue(session, ids):
        QuarantinedMessageFactory(message_id="again")
        return real(session, ids)

    monkeypatch.setattr(quarantine, "requeue", requeue)
    assert operations.requeue_quarantined(topic="t", actor="me").changed == 2
    assert set(QuarantinedMessage.objects.values_list("message_id", flat=True)) == {"again"}


def test_the_preview_counts_what_no_group_will_receive(db, clock):
    publish("t", 1, key="k", id="in the log")
    sequence()
    publish("t", 1, key="k", id="in the outbox", delay=600)
    for topic, key, name in (
        ("t", "k", "in the log"),
        ("t", "k", "in the outbox"),
        ("t", "k", "twice"),
        ("t", "k", "twice"),
        ("t", "other", "in the log"),
        ("u", "k", "in the outbox"),
    ):
        QuarantinedMessageFactory(topic=topic, partition_key=key, message_id=name)
    QuarantinedMessageFactory(expires_at=1)
    QuarantinedMessageFactory(expires_at=2**47)
    rows = list(QuarantinedMessage.objects.values_list("pk", flat=True))
    for how in ({"dry_run": True}, {}):
        _said, duplicates, expired = operations.requeue_quarantined(rows, actor="me", **how).summary
        assert "duplicates" in duplicates
        assert duplicates.endswith(": 3.")
        assert "expired" in expired
        assert expired.endswith(": 1.")
    sequence()
    assert QueueMessage.objects.exclude(message_id="in the outbox", topic="t").count() == 6


def test_queuesequence_says_what_the_log_has_refused(refusing):
    publish_many("t", ["bad", 1])
    assert run_command(name="queuesequence") == (
        "Moved 1 message.\n1 message was refused by the log: see “manage.py queuequarantine”.\n"
    )
    publish("t", "bad")
    found = json.loads(run_command("--format", "json", name="queuesequence"))
    assert (found["moved"], found["quarantined"]) == (0, 1)


def test_deliver_all_raises_if_the_log_refuses_a_message(refusing, no_handlers):
    subscriber("t", group="g")(lambda delivery: got.append(delivery.payload))
    got = []
    publish_many("t", [Message("bad", id="i"), Message(1)])
    with pytest.raises(QueueError, match=r"The log has refused 1 message: message 'i' of topic 't' .*no bad ones"):
        deliver_all()
    assert got == [1]
    assert deliver_all() == [], "that one was reported"
    publish("t", "bad")
    assert deliver_all(raise_exceptions=False) == [], "as with a subscriber"
    assert QuarantinedMessage.objects.count() == 2
