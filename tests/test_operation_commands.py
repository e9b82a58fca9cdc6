"""The operators' commands: what they say, ask, do and print."""

from __future__ import annotations

import io
import json
import re

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from django_mysqlqueue import Message, cancel, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent, Operation, OutboxMessage, QueueMessage
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.groups import GroupRef
from tests.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.test_conformance import Recorder, fail
from tests.test_operations import dead_letters, log, offsets_of

COMMANDS = (
    "queuecancel",
    "queuediscard",
    "queuepause",
    "queueredrive",
    "queuerelease",
    "queueresume",
    "queueretry",
    "queuescheduled",
    "queueseek",
)


def run(name, *arguments, **options):
    out = io.StringIO()
    call_command(name, *arguments, stdout=out, no_color=True, **options)
    return out.getvalue()


def run_json(name, *arguments):
    return json.loads(run(name, *arguments, "--format", "json", "--noinput"))


@pytest.fixture
def answer(monkeypatch):
    """What the person at the terminal types; the questions are kept."""
    asked = []

    def prepare(text):
        def ask(question):
            asked.append(question)
            if text is None:
                raise EOFError
            return text

        monkeypatch.setattr("builtins.input", ask)
        return asked

    return prepare


def scene(name):
    """Something for each command to do: its arguments, and what tells that it was done."""
    if name in ("queuepause", "queueresume", "queueseek", "queueretry"):
        offsets = log(2, "ab")
        action = (lambda delivery: delivery.nack(delay=3600)) if name == "queueretry" else None
        sub = Sub(handler(function=Recorder(action)))
        sub.settle()
        if name == "queueresume":
            call_command("queuepause", "g", "t", "--noinput", stdout=io.StringIO())
        arguments = ["g", "t"] + (["earliest"] if name == "queueseek" else [])
        assert len(offsets) == 2
        return arguments
    if name == "queuerelease":
        log(1, "a")
        Sub(handler()).step()
        return ["g", "t", "a"]
    if name in ("queuecancel", "queuescheduled"):
        publish("t", 1, id="tea", delay=1000)
        return ["t", "tea"] + (["--now"] if name == "queuescheduled" else [])
    dead_letters(2)
    return ["t"] + (["--reason", "test"] if name == "queuediscard" else [])


def everything():
    """All that a command might have changed."""
    return [
        list(model.objects.order_by("pk").values())
        for model in (QueueMessage, OutboxMessage, ConsumerGroup, DeliveryEvent, Operation)
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_dry_run_says_what_would_happen_and_does_nothing(db, name):
    arguments = scene(name)
    before = everything()
    said = run(name, *arguments, "--dry-run")
    assert "will" in said
    assert said.endswith("Nothing was changed (--dry-run).\n")
    found = json.loads(run(name, *arguments, "--dry-run", "--format", "json"))
    assert found["dry_run"] is True
    assert found["planned"] >= 1
    assert found["changed"] == 0
    assert everything() == before


@pytest.mark.parametrize("name", COMMANDS)
def test_it_asks_and_takes_no_for_an_answer(db, name, answer):
    arguments = scene(name)
    before = everything()
    asked = answer("n")
    with pytest.raises(CommandError, match="Nothing was changed"):
        run(name, *arguments)
    answer(None)
    with pytest.raises(CommandError, match="pass --noinput"):
        run(name, *arguments)
    with pytest.raises(CommandError, match="pass --noinput"):
        run(name, *arguments, "--format", "json")
    assert asked == ["Go ahead? [y/N] "] * 2
    assert everything() == before


@pytest.mark.parametrize("name", COMMANDS)
def test_it_does_it_and_says_so(db, name, answer):
    arguments = scene(name)
    answer("y")
    said = run(name, *arguments)
    assert re.search(r"^Done: .+\.$", said, re.MULTILINE)
    operation = Operation.objects.order_by("id").last()
    assert "@" in operation.actor
    assert operation.ended_at


@pytest.mark.parametrize("name", COMMANDS)
def test_json_for_programs(db, name):
    found = run_json(name, *scene(name))
    assert found["database"] == USING
    assert found["dry_run"] is False
    assert found["operation"] == Operation.objects.order_by("id").last().action
    assert isinstance(found["changed"], int)


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_to_do_is_no_question(db, name, answer):
    """A second time: it neither asks nor fails."""
    if name in ("queueseek", "queuerelease", "queuecancel", "queuescheduled", "queuepause", "queueresume"):
        pytest.skip("asks for what it is given, whatever there is")
    arguments = scene(name)
    run(name, *arguments, "--noinput")
    asked = answer(None)
    assert "Done: 0 " in run(name, *arguments)
    assert asked == []


@pytest.mark.parametrize("name", ["queuepause", "queueresume", "queueseek", "queueretry", "queuerelease"])
def test_an_unknown_group_names_those_that_there_are(db, name):
    scene("queuepause")
    more = {"queueseek": ["latest"], "queuerelease": ["a"]}.get(name, [])
    with pytest.raises(CommandError, match=r"no group 'x' of 't'\. Registered: g of t"):
        run(name, "x", "t", *more, "--noinput")


def test_pause_and_resume_twice(db):
    scene("queuepause")
    assert "it is paused." in run("queuepause", "g", "t", "--noinput")
    assert "was paused already" in run("queuepause", "g", "t", "--noinput")
    assert "it goes on." in run("queueresume", "g", "t", "--noinput")
    assert "was not paused" in run("queueresume", "g", "t", "--noinput")


def test_seek_shows_what_it_replays_and_skips(db):
    log(3, "a")
    Sub(handler(function=lambda delivery: fail(delivery) if delivery.payload == 2 else None, max_attempts=None)).step()
    last = offsets_of()[-1]
    said = run("queueseek", "g", "t", "latest", "--dry-run")
    assert f"will go on at offset {last + 1} (latest)" in said
    assert "handled again:  0 messages" in said
    assert "3 messages will never be handled." in said
    found = run_json("queueseek", "g", "t", str(last))
    assert (found["offset"], found["skipped"], found["replayed"]) == (last, 2, 0)
    assert lag() == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "Say where to"),
        (["latest", "--time", "2026-01-01"], "Say where to"),
        (["--time", "yesterday"], "'yesterday' is no date and time"),
        (["--time", "2026-13-01T00:00"], "is no date and time"),
        (["first"], "must be 'earliest', 'latest' or a number"),
        (["0"], "must be 'earliest', 'latest' or a number"),
        (["999999999"], "the log ends at"),
    ],
)
def test_seek_to_nowhere(db, arguments, error):
    scene("queuepause")
    with pytest.raises(CommandError, match=error):
        run("queueseek", "g", "t", *arguments, "--noinput")
    assert not Operation.objects.exists()


@pytest.mark.parametrize("when", ["2001-01-01T00:00", "2001-01-01T00:00:00+02:00"])
def test_seek_to_a_time(db, when):
    scene("queuepause")
    assert lag() == 0
    run("queueseek", "g", "t", "--time", when, "--noinput")
    assert lag() == 2


def test_a_redrive_of_some(db):
    publish_many("t", (Message(number, key="a") for number in range(4)))
    sub = Sub(handler(function=fail, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    letters = offsets_of("t_dlq")
    assert run_json("queueredrive", "t_dlq", "--offset", str(letters[0]), "--offset", str(letters[3]))["changed"] == 2
    assert run_json("queueredrive", "t", "--error", "no 1")["changed"] == 1
    assert run_json("queueredrive", "t", "--group", "h")["changed"] == 0
    assert run_json("queueredrive", "t", "--since", "2100-01-01T00:00")["changed"] == 0
    assert run_json("queueredrive", "t", "--until", "2001-01-01T00:00")["changed"] == 0
    assert run_json("queueredrive", "t", "--rate", "1000", "--limit", "5")["changed"] == 1
    with pytest.raises(CommandError, match=r"rate 0\.0"):
        run("queueredrive", "t", "--rate", "0", "--noinput")


def test_scheduled_messages_are_listed(db):
    assert run("queuescheduled") == "Nothing is scheduled.\n"
    publish("t", 1, delay=1000, id="tea")
    publish("u", 1, delay=2000, id="cup")
    assert re.fullmatch(r"20\d\d-.*  t  tea\n", run("queuescheduled", "t"))
    found = json.loads(run("queuescheduled", "--format", "json"))["scheduled"]
    assert [(one["topic"], one["id"]) for one in found] == [("t", "tea"), ("u", "cup")]
    with pytest.raises(CommandError, match="Name the messages"):
        run("queuescheduled", "t", "--now")
    with pytest.raises(CommandError, match="--key"):
        run("queuescheduled", "t", "--key", "a")
    with pytest.raises(CommandError, match="--limit -5: must be at least 1"):
        run("queuescheduled", "--limit", "-5")
    for when in ([], ["--now", "--at", "2030-01-01T00:00"]):
        with pytest.raises(CommandError, match="Say when"):
            run("queuescheduled", "t", "tea", *when)


def test_scheduled_messages_are_changed_by_their_published_ids(db):
    for key in "ab":
        publish("t", key, key=key, id="tea", delay=1000)
    publish("t", 1, id="cup", delay=1000)
    publish("u", 1, id="tea", delay=1000)
    assert "1 changed." in run("queuescheduled", "t", "tea", "--key", "a", "--at", "2100-01-01T00:00", "--noinput")
    assert "2 changed." in run("queuescheduled", "t", "tea", "--at", "2100-01-02T00:00", "--noinput")
    assert "1 cancelled." in run("queuecancel", "t", "tea", "--key", "b", "--noinput")
    assert "1 changed." in run("queuescheduled", "t", "cup", "--now", "--noinput")
    left = OutboxMessage.objects.order_by("pk").values_list("topic", "partition_key", "deliver_at")
    assert [(topic, at == 1) for topic, _, at in left] == [("t", False), ("t", True), ("u", False)]
    operations = Operation.objects.order_by("id").values_list("action", "topic", "changed")
    assert list(operations) == [
        ("reschedule", "t", 1),
        ("reschedule", "t", 2),
        ("cancel", "t", 1),
        ("deliver now", "t", 1),
    ]


@pytest.mark.parametrize("name", ["queuecancel", "queuescheduled"])
def test_a_scheduled_message_that_is_not_there_is_an_error(db, name):
    more = ["--now"] if name == "queuescheduled" else []
    publish("t", 1, id="tea", delay=1000)
    publish("t", 1, id="at once")
    sequence()
    before = everything()
    for arguments, error in (
        (["nope", "tea"], "There is no topic 'nope'"),
        (["t", "cup"], r"Nothing was changed. Not scheduled for the topic 't': 'cup'"),
        (["t", "at once", "--dry-run"], "Not scheduled for the topic 't': 'at once'"),
        (["t", "tea", "--key", "a"], "Not scheduled for the topic 't': 'tea'"),
    ):
        with pytest.raises(CommandError, match=error):
            run(name, *arguments, *more, "--noinput")
    assert everything() == before
    out = io.StringIO()
    with pytest.raises(CommandError, match=r"Not scheduled for the topic 't': 'cup'"):
        call_command(name, "t", "cup", "tea", *more, "--noinput", "--format", "json", stdout=out)
    found = json.loads(out.getvalue())
    assert (found["changed"], found["not_scheduled"]) == (1, ["cup"])
    with pytest.raises(CommandError, match=r"Nothing was changed. Not scheduled for the topic 't': 'tea'"):
        run(name, "t", "tea", *more, "--noinput")


def test_a_list_of_an_unknown_topic_is_an_error(db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"planned": {"PARTITIONS": 2}}}
    with pytest.raises(CommandError, match="There is no topic 'nope'"):
        run("queuescheduled", "nope")
    publish("used", 1)
    sequence()
    groups.register(USING, GroupRef("g", "read"), mode="ordered", start="earliest")
    for topic in ("planned", "used", "read"):
        assert run("queuescheduled", topic) == "Nothing is scheduled.\n"


@pytest.mark.servers_only
def test_a_command_that_another_transaction_keeps_from_its_message_fails(db):
    publish("t", 1, id="tea", delay=1000)
    with transaction.atomic():
        assert cancel("tea", topic="t") == 1
        with pytest.raises(CommandError, match="another transaction is changing them"):
            in_thread(lambda: run("queuecancel", "t", "tea", "--noinput"))


def test_release_wants_to_know_what(db, clock):
    for arguments in ([], ["g", "t", "a", "--subscriber", "x"]):
        with pytest.raises(CommandError, match="Say what"):
            run("queuerelease", *arguments)
    with pytest.raises(CommandError, match="Say which partitions"):
        run("queuerelease", "g", "t")
    log(1)
    sub = Sub(handler())
    with pytest.raises(CommandError, match="is alive"):
        run("queuerelease", "--subscriber", sub.name, "--noinput")
    clock.advance(31)
    assert "1 heartbeats deleted" in run("queuerelease", "--subscriber", sub.name, "--noinput")


def test_who_did_it_when_the_user_has_no_name(db, monkeypatch):
    import getpass

    def nameless():
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    scene("queuepause")
    run("queuepause", "g", "t", "--noinput")
    assert Operation.objects.get().actor.startswith("uid ")
