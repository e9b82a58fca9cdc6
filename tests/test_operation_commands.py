"""The operators' commands: what they say, ask, do and print."""

from __future__ import annotations

import io
import json
import re

import pytest
from django.core.management import CommandError, call_command

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent, Operation, OutboxMessage, QueueMessage
from django_mysqlqueue.service import rescheduling
from tests.harness import USING, Sub, handler, lag, sequence
from tests.test_conformance import Recorder, fail
from tests.test_operations import dead_letters, log, offsets_of

COMMANDS = (
    "queuecancel",
    "queuedeadletter",
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
    if name in ("queuepause", "queueresume", "queueseek", "queueretry", "queuedeadletter"):
        offsets = log(2, "ab")
        waits = name in ("queueretry", "queuedeadletter")
        action = (lambda delivery: delivery.nack(delay=3600)) if waits else None
        sub = Sub(handler(function=Recorder(action)))
        sub.settle()
        if name == "queueresume":
            call_command("queuepause", "g", "t", "--noinput", stdout=io.StringIO())
        more = {"queueseek": ["earliest"], "queuedeadletter": [str(offset) for offset in offsets]}
        arguments = ["g", "t", *more.get(name, [])]
        assert len(offsets) == 2
        return arguments
    if name == "queuerelease":
        log(1, "a")
        Sub(handler()).step()
        return ["g", "t", "a"]
    if name in ("queuecancel", "queuescheduled"):
        publish("t", 1, delay=1000)
        (one,) = rescheduling.scheduled(USING)
        return [str(one.outbox_id)] + (["--now"] if name == "queuescheduled" else [])
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


GIVEN = (
    "queuecancel",
    "queuedeadletter",
    "queuepause",
    "queuerelease",
    "queueresume",
    "queuescheduled",
    "queueseek",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_to_do_is_no_question(db, name, answer):
    """A second time: it neither asks nor fails."""
    if name in GIVEN:
        pytest.skip("asks for what it is given, whatever there is")
    arguments = scene(name)
    run(name, *arguments, "--noinput")
    asked = answer(None)
    assert "Done: 0 " in run(name, *arguments)
    assert asked == []


@pytest.mark.parametrize(
    "name", ["queuepause", "queueresume", "queueseek", "queueretry", "queuerelease", "queuedeadletter"]
)
def test_an_unknown_group_names_those_that_there_are(db, name):
    scene("queuepause")
    more = {"queueseek": ["latest"], "queuerelease": ["a"], "queuedeadletter": ["1"]}.get(name, [])
    with pytest.raises(CommandError, match=r"no group 'x' of 't'\. Registered: g of t"):
        run(name, "x", "t", *more, "--noinput")


def test_pause_and_resume_twice(db):
    scene("queuepause")
    assert "it is paused." in run("queuepause", "g", "t", "--noinput")
    assert "was paused already" in run("queuepause", "g", "t", "--noinput")
    assert "it goes on." in run("queueresume", "g", "t", "--noinput")
    assert "was not paused" in run("queueresume", "g", "t", "--noinput")


def test_dead_letter_says_what_it_is_about_and_does_all_or_nothing(db):
    _, _, first, second = scene("queuedeadletter")
    said = run("queuedeadletter", "g", "t", first, "--reason", "a test order", "--noinput")
    assert said == (
        "1 message of the group g/t will be dead-lettered to t_dlq:\n"
        f"  message {first}: 1 failed attempt\n"
        "Done: 1 dead-lettered.\n"
    )
    assert Operation.objects.get().detail == f"message {first} (a test order)"
    before = everything()
    for options in (["--noinput"], ["--dry-run"], ["--noinput", "--format", "json"]):
        with pytest.raises(CommandError, match=f"message {first} is settled already") as refused:
            run("queuedeadletter", "g", "t", second, first, *options)
        assert refused.value.returncode == 1
    with pytest.raises(CommandError, match="message 999999999 is not in the log of 't'"):
        run("queuedeadletter", "g", "t", "999999999", "--noinput")
    with pytest.raises(CommandError, match="invalid int value: 'first'"):
        run("queuedeadletter", "g", "t", "first", "--noinput")
    assert everything() == before
    assert lag() == 1


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
    publish("u", 1, delay=2000)
    assert re.search(r"\d+  20\d\d-.*  t  tea\n", run("queuescheduled", "--topic", "t"))
    found = json.loads(run("queuescheduled", "--format", "json"))["scheduled"]
    assert [one["topic"] for one in found] == ["t", "u"]
    with pytest.raises(CommandError, match="Say which"):
        run("queuescheduled", "--now")
    with pytest.raises(CommandError, match="--limit -5: must be at least 1"):
        run("queuescheduled", "--limit", "-5")
    ids = [str(one["outbox_id"]) for one in found]
    with pytest.raises(CommandError, match="Say when"):
        run("queuescheduled", *ids)
    with pytest.raises(CommandError, match="Say when"):
        run("queuescheduled", *ids, "--now", "--at", "2030-01-01T00:00")
    assert "2 changed." in run("queuescheduled", *ids, "--at", "2100-01-01T00:00", "--noinput")
    assert "1 cancelled; 1 were not scheduled any more." in run("queuecancel", ids[0], "999999", "--noinput")


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
