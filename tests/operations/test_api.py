"""``django_mysqlqueue.operations``, as a script calls it: what each previews, does, records and refuses."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from django_mysqlqueue import Message, operations, publish, publish_many, subscriber
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    JobResult,
    Operation,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    Reader,
    Schedule,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import EditResult, Result, dropping, results, seeking
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.operations.seeking import Position
from tests.support import job_worlds, schedule_worlds
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import MAX_METADATA_BYTES, GroupRef, Session, groups, retention
from tests.support.tables import Tables

REF = GroupRef("g", "t")
LATER = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


def waiting() -> None:
    """Messages x and y, at which the group has failed once."""
    publish_many("t", [Message(1, key="a", id="x"), Message(2, key="b", id="y")])
    Sub(handler(function=lambda delivery: delivery.nack(delay=3600))).settle()


def dead() -> None:
    """Dead letters of the messages x and y."""
    publish_many("t", [Message(1, key="a", id="x"), Message(2, key="b", id="y")])
    sub = Sub(handler(function=lambda delivery: delivery.reject("no")))
    sub.settle()
    sub.leave()
    sequence()


def scheduled() -> None:
    publish("t", 1, id="x", delay=1000)


@job_worlds.configured()
def jobs() -> None:
    """A job that waits, and has no message: it is of a later stage of a chain."""
    job_worlds.chained()
    JobResult.objects.exclude(id=job_worlds.LATER).delete()


@job_worlds.configured()
def cancel_job(**how: Any) -> Result:
    return operations.cancel(job_worlds.JOBS.topic, [job_worlds.LATER], **how)


def registered() -> None:
    groups.register(USING, REF, mode="ordered", start="earliest")


def paused() -> None:
    registered()
    operations.pause(*REF, actor="ada")


def overridden() -> None:
    registered()
    ConsumerGroup.objects.update(overrides={"claim_size": {"value": 3, "at": 5, "by": "bob"}})


def failed() -> None:
    """Two messages wait after errors."""
    publish_many("t", [Message({"n": 1}, key="a", id="x"), Message({"n": 2}, key="b", id="y")])
    Sub(handler(function=lambda delivery: delivery.nack(3600, f"no {delivery.payload['n']}"))).settle()


def owned() -> None:
    publish("t", 1, key="a")
    Sub(handler()).step()


def lost() -> None:
    owned()
    SubscriberHeartbeat.objects.update(heartbeat_at=1)


def a_subscriber() -> str:
    return str(SubscriberHeartbeat.objects.values_list("subscriber_name", flat=True)[0])


def a_row() -> int:
    return QuarantinedMessage.objects.values_list("pk", flat=True).first() or 1


def first_offset() -> int:
    return QueueMessage.objects.order_by("offset").values_list("offset", flat=True).first() or 1


def prepared() -> None:
    registered()
    publish("t", 1)
    sequence()
    operations.prepare_move("t", "queue", actor="bob", reason="earlier")
    QueueMessage.objects.all().delete()
    Operation.objects.all().delete()


def recurring() -> None:
    schedule_worlds.registered(schedule_worlds.of_topic())


def paused_schedule() -> None:
    recurring()
    Schedule.objects.update(paused_at=5)


def abandoned() -> None:
    recurring()
    Schedule.objects.update(seen_at=5)


def editable() -> None:
    schedule_worlds.created(schedule_worlds.of_task())


def create_recurring(**how: Any) -> Result:
    with job_worlds.configured():
        return operations.create_recurring("s", job_worlds.PATH, every=60, **how)


def update_recurring(**how: Any) -> Result:
    with job_worlds.configured():
        return operations.update_recurring("s", args=[5], **how)


def import_celery_beat(**how: Any) -> Result:
    with schedule_worlds.periodic_task():
        return operations.import_celery_beat(**how)


def move(**how: Any) -> Result:
    with override_settings(MYSQLQUEUE={"TOPICS": {"t": {"DATABASE": "queue", "VIA": USING}}}):
        return operations.move_topic("t", "queue", **how)


def a_reader() -> None:
    Reader.objects.create(name="lake", read_offset=0)


CALLS: dict[str, tuple[Callable[[], None], Callable[..., Result]]] = {
    "pause": (registered, lambda **how: operations.pause(*REF, **how)),
    "resume": (paused, lambda **how: operations.resume(*REF, **how)),
    "seek": (waiting, lambda **how: operations.seek(*REF, "earliest", **how)),
    "drop_group": (waiting, lambda **how: operations.drop_group(*REF, **how)),
    "set_group_mode": (registered, lambda **how: operations.set_group_mode(*REF, "shared", **how)),
    "retry": (waiting, lambda **how: operations.retry(*REF, ids=["x"], **how)),
    "retry with an error": (failed, lambda **how: operations.retry(*REF, error="no 1", **how)),
    "retry at a time": (waiting, lambda **how: operations.retry(*REF, ids=["x"], at=LATER, **how)),
    "dead_letter": (waiting, lambda **how: operations.dead_letter(*REF, ids=["x"], **how)),
    "redrive": (dead, lambda **how: operations.redrive("t", ids=["x"], **how)),
    "discard": (dead, lambda **how: operations.discard("t", ids=["x"], **how)),
    "publish": (lambda: None, lambda **how: operations.publish("t", 1, **how)),
    "replay": (waiting, lambda **how: operations.replay(*REF, first_offset(), first_offset(), **how)),
    "edit": (dead, lambda **how: operations.edit("t", {"n": 3}, id="x", **how)),
    "cancel": (scheduled, lambda **how: operations.cancel("t", ["x"], **how)),
    "cancel a job": (jobs, cancel_job),
    "reschedule": (scheduled, lambda **how: operations.reschedule("t", ["x"], LATER, **how)),
    "reschedule to now": (scheduled, lambda **how: operations.reschedule("t", ["x"], None, **how)),
    "release": (owned, lambda **how: operations.release(*REF, ["a"], **how)),
    "settings": (registered, lambda **how: operations.settings(*REF, {"max_attempts": 3}, **how)),
    "settings unset": (overridden, lambda **how: operations.settings(*REF, unset=["claim_size"], **how)),
    "prepare_move": (registered, lambda **how: operations.prepare_move("t", "queue", **how)),
    "move_topic": (prepared, move),
    "cancel_move": (prepared, lambda **how: operations.cancel_move("t", "queue", **how)),
    "create_recurring": (lambda: None, create_recurring),
    "update_recurring": (editable, update_recurring),
    "import_celery_beat": (lambda: None, import_celery_beat),
    "run_recurring": (recurring, lambda **how: operations.run_recurring("s", **how)),
    "pause_recurring": (recurring, lambda **how: operations.pause_recurring("s", **how)),
    "resume_recurring": (paused_schedule, lambda **how: operations.resume_recurring("s", **how)),
    "delete_recurring": (abandoned, lambda **how: operations.delete_recurring("s", **how)),
    "requeue_quarantined": (QuarantinedMessageFactory, lambda **how: operations.requeue_quarantined([a_row()], **how)),
    "delete_quarantined": (QuarantinedMessageFactory, lambda **how: operations.delete_quarantined([a_row()], **how)),
    "drop_reader": (a_reader, lambda **how: operations.drop_reader("lake", **how)),
    "erase": (lambda: publish("t", 1, key="eva"), lambda **how: operations.erase("t", "eva", **how)),
    "forget": (lost, lambda **how: operations.forget(a_subscriber(), **how)),
}
"""Function → what must be there, and a call that changes something of it."""


def everything() -> Any:
    return dataclasses.replace(Tables.read(USING), now=0)


def test_every_operation_has_a_case():
    functions = {name for name in operations.__all__ if inspect.isfunction(getattr(operations, name))}
    assert functions == {name.partition(" ")[0] for name in CALLS}


@pytest.mark.parametrize("name", sorted({name.partition(" ")[0] for name in CALLS}))
def test_help_describes_each_argument_once(name):
    operation = getattr(operations, name)
    arguments = inspect.getdoc(operation).partition("\nArgs:\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^    (\w+): ", arguments, re.MULTILINE)) == sorted(
        inspect.signature(operation).parameters
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_dry_run_changes_nothing_and_says_what_would_be_done(db, name):
    prepare, call = CALLS[name]
    prepare()
    before = everything()
    found = call(actor="ada", reason="a test", dry_run=True)
    assert found.dry_run
    assert (found.planned, found.changed) == (1, 0)
    assert all(line.endswith(".") and "%(" not in line for line in (*found.summary, *found.warnings))
    assert "will" in " ".join(found.summary)
    assert everything() == before
    assert not Operation.objects.exclude(action="pause").exists()


@pytest.mark.parametrize("name", CALLS)
def test_it_is_done_and_on_record_with_actor_and_reason(db, name):
    prepare, call = CALLS[name]
    prepare()
    found = call(actor="ada", reason="a test")
    assert not found.dry_run
    assert (found.planned, found.changed) == (1, 1)
    assert all(line.endswith(".") and "%(" not in line for line in found.summary)
    row = Operation.objects.order_by("id").last()
    assert (row.action, row.actor, row.reason) == (found.operation, "ada", "a test")
    assert row.ended_at


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("actor", ["", " ", None])
def test_nobody_is_refused(db, name, actor):
    prepare, call = CALLS[name]
    prepare()
    before = Operation.objects.count()
    with pytest.raises(OperationRefused, match=r"actor .*: must (not be empty|be a str)"):
        call(actor=actor, reason="a test")
    assert Operation.objects.count() == before


# The queues of ``TASKS`` always exist.
UNKNOWN = (
    r"There is no (group|topic|subscriber|schedule|registered reader) '"
    r"|Neither waiting nor running in topic 'jobs.default': "
    r"|None of these messages is in the quarantine\."
)


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"publish", "create_recurring", "erase", "import_celery_beat"}))
def test_an_unknown_name_is_refused(db, name):
    """In an empty queue there is nothing of all this.

    A message may be the first one of its topic, a schedule new, and a topic only in the archive.
    """
    _prepare, call = CALLS[name]
    if name == "forget":
        call = lambda **how: operations.forget("nobody", **how)  # noqa: E731
    for how in ({}, {"dry_run": True}):
        with pytest.raises(OperationRefused, match=UNKNOWN):
            call(actor="ada", reason="a test", **how)
    assert not Operation.objects.exists()


@pytest.mark.servers_only
@pytest.mark.parametrize("name", CALLS)
def test_it_commits_apart_from_the_callers_transaction(db, name):
    prepare, call = CALLS[name]
    prepare()
    with transaction.atomic():
        assert not ConsumerGroup.objects.filter(consumer_group="another").exists()  # the transaction has begun
        assert call(actor="ada", reason="a test").changed == 1
        transaction.set_rollback(True)
    assert Operation.objects.order_by("id").last().reason == "a test"


@pytest.mark.servers_only
@pytest.mark.parametrize("is_open", [False, True])
def test_it_commits_where_autocommit_is_off(db, is_open):
    registered()

    def pause() -> Result:
        connection.settings_dict = {**connection.settings_dict, "AUTOCOMMIT": False}
        if is_open:
            assert not ConsumerGroup.objects.filter(consumer_group="another").exists()
            assert not connection.get_autocommit()
        try:
            return operations.pause(*REF, actor="ada")
        finally:
            if is_open:
                connection.rollback()

    assert in_thread(pause).changed == 1
    assert ConsumerGroup.objects.get().paused
    assert Operation.objects.get().actor == "ada"


STATES = (
    "pause",
    "resume",
    "set_group_mode",
    "settings",
    "settings unset",
    "release",
    "pause_recurring",
    "resume_recurring",
    "update_recurring",
)


@pytest.mark.parametrize("name", [*STATES, "retry", "retry with an error", "retry at a time", "redrive", "discard"])
def test_a_second_time_there_is_nothing_to_do(db, name):
    prepare, call = CALLS[name]
    prepare()
    if name in ("redrive", "discard"):
        call = lambda **how: getattr(operations, name)("t", **how)  # noqa: E731
    elif name == "retry":
        call = lambda **how: operations.retry(*REF, **how)  # noqa: E731
    elif name == "retry at a time":
        call = lambda **how: operations.retry(*REF, at=LATER, **how)  # noqa: E731
    call(actor="ada", reason="a test")
    number = Operation.objects.count()
    for dry_run in (True, False):
        found = call(actor="ada", reason="a test", dry_run=dry_run)
        assert (found.planned, found.changed) == (0, 0)
        (text,) = found.summary
        assert text.endswith(".")
        assert "will" not in text
    if name in STATES:
        assert Operation.objects.count() == number, "nor is it on record"


# -- messages by their ids ----------------------------------------------------


def test_ids_that_nothing_bears_are_named(db):
    waiting()
    for call, text in (
        (lambda: operations.retry(*REF, ids=["x", "z"], actor="ada"), "are not waiting for another attempt .*: 'z'"),
        (lambda: operations.dead_letter(*REF, ids=["x", "z"], actor="ada"), "has not claimed these messages.*: 'z'"),
        (lambda: operations.redrive("t", ids=["z"], actor="ada"), "t_dlq has no dead letter of these messages: 'z'"),
        (lambda: operations.edit("t", 1, id="z", actor="ada"), "id 'z': t_dlq has no dead letter of this message"),
        (lambda: operations.cancel("t", ["z"], actor="ada"), "Not scheduled in topic 't': 'z'"),
    ):
        with pytest.raises(OperationRefused, match=text):
            call()
    assert not Operation.objects.exists()


def test_missing_ones_may_be_passed_over(db):
    waiting()
    assert operations.retry(*REF, ids=["x", "z"], missing_ok=True, actor="ada").changed == 1
    operations.dead_letter(*REF, ids=["y"], actor="ada")
    sequence()
    assert operations.redrive("t", ids=["y", "z"], missing_ok=True, actor="ada").changed == 1


def test_an_id_names_the_message_of_every_key(db):
    """Ids are unique within a key."""
    publish_many("t", [Message(number, key=key, id="x") for number, key in enumerate("ab")])
    Sub(handler(function=lambda delivery: delivery.nack(delay=3600))).settle()
    assert operations.retry(*REF, ids=["x"], actor="ada").changed == 2


def test_a_redriven_message_still_has_the_id_that_it_was_published_with(db):
    dead()
    assert operations.redrive("t", ids=["x"], actor="ada").changed == 1
    Sub(handler(function=lambda delivery: delivery.nack(delay=3600))).settle()
    assert operations.dead_letter(*REF, ids=["x"], actor="ada").changed == 1
    sequence()
    assert operations.discard("t", ids=["x"], actor="ada", reason="enough").changed == 1
    assert [row.original_id for row in QueueMessage.objects.filter(topic="t_dlq")] == ["y"]


def test_a_message_that_two_groups_failed_is_edited_by_its_offset(db):
    publish("t", 1, id="x")
    reject = [handler(group=name, function=lambda delivery: delivery.reject("no")) for name in ("g", "h")]
    Sub(*reject).settle()
    sequence()
    offsets = list(QueueMessage.objects.filter(topic="t_dlq").order_by("offset").values_list("offset", flat=True))
    with pytest.raises(
        OperationRefused, match=f"2 dead letters of this message, at the offsets {offsets[0]}, {offsets[1]}"
    ):
        operations.edit("t", 2, id="x", actor="ada")
    found = operations.edit("t", 2, offset=offsets[0], actor="ada")
    assert isinstance(found, EditResult)
    assert OutboxMessage.objects.get().message_id == found.message_id
    with pytest.raises(OperationRefused, match="pass exactly one of them"):
        operations.edit("t", 2, actor="ada")


# -- arguments ----------------------------------------------------------------


def test_seek_wants_one_position(db):
    registered()
    for arguments in ({}, {"position": "latest", "time": LATER}):
        with pytest.raises(OperationRefused, match="exactly one of them"):
            operations.seek(*REF, actor="ada", **arguments)
    with pytest.raises(OperationRefused, match="time '2026': must be a datetime"):
        operations.seek(*REF, time="2026", actor="ada")  # type: ignore[arg-type]
    with pytest.raises(OperationRefused, match="mode 'fifo': must be one of 'ordered', 'shared'"):
        operations.set_group_mode(*REF, "fifo", actor="ada")  # type: ignore[arg-type]
    with pytest.raises(OperationRefused, match=r"keys \[\]: must not be empty"):
        operations.release(*REF, [], actor="ada")


SURROGATE = "\ud800"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: operations.pause("g", 5, actor="ada"), "topic 5: must be a str"),
        (lambda: operations.pause(None, "t", actor="ada"), "group None: must be a str"),
        (lambda: operations.pause("g", SURROGATE, actor="ada"), "topic .*lone surrogate"),
        (lambda: operations.pause(*REF, actor="a" * 191), "actor 'a+…: 191 characters, but at most 190"),
        (lambda: operations.pause(*REF, actor="ada", reason=None), "reason None: must be a str"),
        (lambda: operations.pause(*REF, actor="ada", reason="x" * 1001), "reason 'x+…: 1,001 characters"),
        (lambda: operations.pause(*REF, actor="ada", using="nope"), "using 'nope': DATABASES has no such alias"),
        (lambda: operations.forget(7, actor="ada"), "subscriber 7: must be a str"),
        (lambda: operations.release(*REF, "a", actor="ada"), "keys 'a': must be a list"),
        (lambda: operations.retry(*REF, error=5, actor="ada"), "error 5: must be a str"),
        (lambda: operations.retry(*REF, at="tomorrow", actor="ada"), "at 'tomorrow': must be a datetime"),
        (lambda: operations.retry(*REF, ids="xy", actor="ada"), "ids 'xy': must be a list"),
        (lambda: operations.retry(*REF, ids=[], actor="ada"), r"ids \[\]: must not be empty"),
        (lambda: operations.retry(*REF, ids=[5], actor="ada"), "ids 5: must be a str"),
        (lambda: operations.retry(*REF, offsets=[True], actor="ada"), "offsets True: must be an integer"),
        (lambda: operations.retry(*REF, offsets=[2**63], actor="ada"), "offsets 9223372036854775808: must be"),
        (lambda: operations.retry(*REF, offsets=["4abc"], actor="ada"), "offsets '4abc': must be an integer"),
        (lambda: operations.dead_letter(*REF, actor="ada"), "ids or offsets: pass at least one"),
        (lambda: operations.redrive("t", ids="xy", missing_ok=True, actor="ada"), "ids 'xy': must be a list"),
        (lambda: operations.redrive("t", rate=float("nan"), actor="ada"), "rate nan: must be more than 0"),
        (lambda: operations.redrive("t", rate=1e-320, actor="ada"), "rate 1e-320: must be from 0.001"),
        (lambda: operations.redrive("t", rate="1", actor="ada"), "rate '1': must be more than 0"),
        (lambda: operations.redrive("t", limit=1.5, actor="ada"), "limit 1.5: must be an integer of at least 1"),
        (lambda: operations.redrive("t", error=5, actor="ada"), "error 5: must be a str"),
        (
            lambda: operations.discard("t", limit=True, actor="ada", reason="x"),
            "limit True: must be an integer of at least 1",
        ),
        (lambda: operations.edit("t", 1, offset="4abc", actor="ada"), "offset '4abc': must be an integer"),
        (lambda: operations.edit("t", 1, id=4, actor="ada"), "id 4: must be a str"),
        (lambda: operations.cancel("t", "xy", actor="ada"), "ids 'xy': must be a list"),
        (lambda: operations.cancel("t", ["x"], key=3, actor="ada"), "key 3: must be a str"),
    ],
)
def test_an_argument_that_breaks_a_rule_is_named(db, call, says):
    waiting()
    publish("t", 0, id="s", delay=1000)
    with pytest.raises(OperationRefused, match=says):
        call()
    assert not Operation.objects.exists()


def test_a_time_after_the_year_9999_is_refused(db):
    scheduled()
    late = datetime.datetime(9999, 12, 31, 23, tzinfo=datetime.timezone(-datetime.timedelta(hours=12)))
    with pytest.raises(OperationRefused, match="must be before the year 10000 in UTC"):
        operations.reschedule("t", ["x"], late, actor="ada")
    assert operations.reschedule("t", ["x"], datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC), actor="ada").changed


def test_while_a_seek_is_under_way_only_a_seek_or_a_drop_begins(db):
    """What it would do to the group is not what the caller saw: a pause would be lost when the seek ends."""
    waiting()
    refused: list[str] = []

    def others(rows: int) -> None:
        for dry_run in (True, False):
            for name in ("pause", "resume", "set_group_mode", "retry", "dead_letter"):
                with pytest.raises(OperationRefused, match=r"A seek .* has not finished"):
                    CALLS[name][1](actor="bob", reason="meanwhile", dry_run=dry_run)
                refused.append(name)
            assert operations.drop_group(*REF, actor="bob", dry_run=True).planned == 1
            assert operations.seek(*REF, "latest", actor="bob", dry_run=True).planned == 1

    operations.seek(*REF, "earliest", actor="ada", progress=others)
    assert len(refused) >= 10
    assert not ConsumerGroup.objects.get().paused
    assert [row.actor for row in Operation.objects.all()] == ["ada"]


def test_a_seek_of_a_paused_group_says_that_it_stays_paused(db):
    paused()
    for dry_run in (True, False):
        found = operations.seek(*REF, "earliest", actor="ada", dry_run=dry_run)
        assert found.warnings == ("The group is paused and stays paused until you resume it.",)
    operations.resume(*REF, actor="ada")
    assert not operations.seek(*REF, "earliest", actor="ada").warnings


def test_a_preview_refuses_what_would_be_refused(db):
    owned()
    name = a_subscriber()
    with pytest.raises(OperationRefused, match="is alive: stop it first"):
        operations.forget(name, actor="ada", dry_run=True)
    with pytest.raises(OperationRefused, match="has live subscribers"):
        operations.set_group_mode(*REF, "shared", actor="ada", dry_run=True)


def test_a_redrive_for_a_group_that_is_gone_is_refused_by_the_preview_too(db):
    dead()
    operations.drop_group(*REF, actor="ada")
    for dry_run in (True, False):
        with pytest.raises(OperationRefused, match="is no longer registered"):
            operations.redrive("t", actor="ada", dry_run=dry_run)
    assert operations.discard("t", actor="ada", reason="gone", dry_run=True).planned == 2


def test_ids_and_offsets_name_dead_letters_and_the_other_conditions_choose_among_them(db):
    dead()
    first, second = QueueMessage.objects.filter(topic="t_dlq").order_by("original_id")
    for named, planned in (
        ({"ids": [first.original_id], "offsets": [second.offset]}, 2),
        ({"ids": [first.original_id]}, 1),
        ({"offsets": [second.offset], "error": "something else"}, 0),
        ({"since": LATER}, 0),
    ):
        assert operations.redrive("t", actor="ada", dry_run=True, **named).planned == planned


def test_a_preview_of_an_edit_knows_the_metadata_that_the_new_message_has(db):
    """They name the old message's id, so they may become too long."""
    room = MAX_METADATA_BYTES - len('{"long":"","content_type":"application/json"}')
    publish("t", 1, id="x", metadata={"long": "m" * room})
    Sub(handler(function=lambda delivery: delivery.reject("no"))).settle()
    sequence()
    for dry_run in (True, False):
        with pytest.raises(InvalidMessage, match="metadata"):
            operations.edit("t", 2, id="x", actor="ada", dry_run=dry_run)


def test_a_finished_operation_gives_its_exact_number(db, monkeypatch):
    dead()
    monkeypatch.setattr(results, "COUNTED", 2)
    assert "2 or more." in operations.redrive("t", actor="ada", dry_run=True).summary[0]
    assert operations.redrive("t", actor="ada").summary == ("Dead letters redriven: 2.",)


def test_a_discard_wants_a_reason(db):
    dead()
    with pytest.raises(OperationRefused, match="reason ''"):
        operations.discard("t", actor="ada", reason="")
    assert QueueMessage.objects.filter(topic="t_dlq").count() == 2


def test_progress_is_told_of_every_step(db):
    waiting()
    steps: list[int] = []
    operations.retry(*REF, actor="ada", progress=steps.append)
    assert sum(steps) == 2
    dead_lettered = operations.dead_letter(*REF, ids=["x", "y"], actor="ada")
    assert dead_lettered.changed == 2
    sequence()
    steps.clear()
    operations.redrive("t", rate=1000, actor="ada", progress=steps.append)
    assert sum(steps) == 2
    steps.clear()
    operations.seek(*REF, "earliest", actor="ada", progress=steps.append)
    assert sum(steps) >= 2
    steps.clear()
    offsets_rows = ConsumerOffset.objects.count()
    operations.drop_group(*REF, actor="ada", progress=steps.append)
    assert sum(steps) >= offsets_rows > 0


def test_a_preview_of_a_drop_of_very_many_partitions_says_where_counting_stopped(db, monkeypatch):
    publish_many("t", [Message(n, key=key) for n in range(2) for key in "abc"])
    sequence()
    Sub(handler())
    assert retention.held_back_by(Session(USING), REF, most=9, rows=1, seconds=60) == (6, True)
    assert retention.held_back_by(Session(USING), REF, most=3, rows=1, seconds=60) == (3, True)
    assert retention.held_back_by(Session(USING), REF, most=9, rows=1, seconds=0) == (2, False)
    monkeypatch.setattr(dropping, "LIMITS", OperationLimits(rows=1, seconds=0))
    found = operations.drop_group(*REF, actor="ada", dry_run=True)
    assert (found.unsettled, found.kept_for_it_alone) == (6, 2)
    assert "Counting stopped at its limit of messages or time: the numbers may be higher." in found.warnings


@pytest.mark.parametrize("most", range(1, 9))
def test_a_preview_of_a_drop_counts_what_no_other_group_keeps(db, most):
    publish_many("t", [Message(n, key=key) for key, number in (("a", 9), ("b", 4), ("c", 2)) for n in range(number)])
    sequence()
    offsets = {
        key: list(QueueMessage.objects.filter(partition_key=key).values_list("offset", flat=True)) for key in "abc"
    }
    Sub(handler())
    assert retention.held_back_by(Session(USING), REF, most=20, rows=2, seconds=60) == (15, True)
    Sub(handler(group="h"))
    assert retention.held_back_by(Session(USING), REF, most=20, rows=2, seconds=60) == (0, True)
    for group, key, passed in (("g", "a", 2), ("h", "a", 7), ("h", "b", 1), ("g", "c", 1)):
        place = offsets[key][passed - 1]
        ConsumerOffset.objects.create(
            consumer_group=group, topic="t", partition_key=key, offset_acked=place, offset_claimed=place
        )
    held = retention.held_back_by(Session(USING), REF, most=most, rows=2, seconds=60)
    assert held == (min(most, 5 + 1), True)


def test_a_preview_of_a_drop_counts(db):
    waiting()
    found = operations.drop_group(*REF, actor="ada", dry_run=True)
    assert (found.unsettled, found.kept_for_it_alone, len(found.live_subscribers)) == (2, 2, 1)
    operations.drop_group(*REF, actor="ada")
    assert not ConsumerGroup.objects.exists()
    assert not DeliveryState.objects.exists()


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("latest", "the group then starts after the newest message"),
        ("earliest", "all messages that are still in the log"),
    ],
)
def test_a_preview_of_a_drop_says_what_becomes_of_dead_letters_and_of_a_restart(db, no_handlers, start, says):
    dead()
    subscriber(REF.topic, group=REF.group, start=start)(print)
    Sub(handler(*reversed(REF)))
    dead_letters, live, again = operations.drop_group(*REF, actor="ada", dry_run=True).warnings
    assert dead_letters.startswith("Dead letters of the group: ")
    assert "They stay in t_dlq, but cannot be redriven unless the group is registered again." in dead_letters
    assert live.endswith("stop them before you drop the group.")
    assert says in again
    operations.drop_group(*REF, actor="ada")
    with pytest.raises(OperationRefused, match="is no longer registered"):
        operations.redrive("t", actor="ada")


def test_leases_of_a_shared_group_are_not_released(db):
    Sub(handler("t", "shared", mode="shared"))
    with pytest.raises(OperationRefused, match="shared/t is shared: its subscribers hold no leases"):
        operations.release("shared", "t", ["k"], actor="ada")


def test_a_preview_says_where_counting_stopped():
    found = seeking.Preview(Position(7), replayed=0, skipped=10_000, exact=False)
    stopped = "Counting stopped at its limit of messages or time: the numbers may be higher."
    seek = seeking.previewed_seek(REF, "latest", found)
    assert stopped in seek.warnings
    assert "Unsettled messages that will be skipped: 10,000 or more." in seek.summary
    assert (seek.exact, seek.offset) == (False, 8)
    drop = dropping.previewed_drop(REF, found, 12, (), 0)
    assert drop.warnings == (stopped,)
    assert not dropping.previewed_drop(REF, dataclasses.replace(found, exact=True), 12, (), 0).warnings


def test_an_edit_goes_to_the_group_alone(db):
    dead()
    others: list[Any] = []
    got: list[Any] = []
    operations.edit("t", "better", id="x", actor="ada", reason="typo")
    subs = Sub(
        handler(function=lambda delivery: got.append(delivery.payload)),
        handler(group="other", function=lambda delivery: others.append(delivery.payload)),
    )
    subs.settle()
    assert got == ["better"]
    assert others == [1, 2]
    assert lag() == 0
