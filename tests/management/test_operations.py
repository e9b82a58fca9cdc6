"""The operators' commands: what they say, ask, do and print."""

from __future__ import annotations

import io
import json
import re
from functools import partial

import pytest
from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.db import transaction

from django_mysqlqueue import Message, cancel, publish, publish_many
from django_mysqlqueue.models import (
    CollectedTopic,
    ConsumerGroup,
    DeliveryEvent,
    DeliveryState,
    JobResult,
    Operation,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
)
from django_mysqlqueue.options.topics import dlq_topic
from tests.support import job_worlds
from tests.support.handlers import Recorder, fail
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import GroupRef, Session, groups
from tests.support.internals import log as service_log
from tests.support.scenarios import dead_letters, log, offsets_of

COMMANDS = (
    "queuecancel",
    "queuedeadletter",
    "queuediscard",
    "queuepause",
    "queueredrive",
    "queuerelease",
    "queuereplayrange",
    "queueresume",
    "queueretry",
    "queuescheduled",
    "queueseek",
    "queueset",
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
    if name in (
        "queuepause", "queueresume", "queueseek", "queueset", "queueretry", "queuedeadletter", "queuereplayrange",
    ):  # fmt: skip
        offsets = log(2, "ab")
        waits = name in ("queueretry", "queuedeadletter")
        action = (lambda delivery: delivery.nack(delay=3600)) if waits else None
        sub = Sub(handler(function=Recorder(action)))
        sub.settle()
        if name == "queueresume":
            call_command("queuepause", "g", "t", "--noinput", stdout=io.StringIO())
        more = {
            "queueseek": ["earliest"],
            "queueset": ["max_attempts=9"],
            "queuedeadletter": [str(offset) for offset in offsets],
            "queuereplayrange": [str(offset) for offset in offsets],
        }
        arguments = ["g", "t", *more.get(name, [])]
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
    assert asked == ["Continue? [y/N] "] * 2
    assert everything() == before


@pytest.mark.parametrize("name", COMMANDS)
def test_it_does_it_and_says_so(db, name, answer):
    arguments = scene(name)
    answer("y")
    said = run(name, *arguments)
    operation = Operation.objects.order_by("id").last()
    *planned, done = said.splitlines()
    assert "will" in " ".join(planned)
    assert done.endswith(".")
    assert "will" not in done
    assert "@" in operation.actor
    assert operation.ended_at


@pytest.mark.parametrize("name", COMMANDS)
def test_json_for_programs(db, name):
    found = run_json(name, *scene(name))
    assert found["database"] == USING
    assert found["dry_run"] is False
    assert found["operation"] == Operation.objects.order_by("id").last().action
    assert isinstance(found["changed"], int)


TWICE = {
    "queuediscard": "No dead letters of t_dlq match",
    "queuepause": "The group g/t is already paused",
    "queueredrive": "No dead letters of t_dlq match",
    "queuerelease": "No subscriber of the group g/t holds these leases",
    "queueresume": "The group g/t is not paused",
    "queueretry": "No messages of the group g/t are waiting for another attempt",
    "queueset": "max_attempts of the group g/t is already overridden with 9",
}
"""Commands that find nothing to change a second time, and what they say."""


@pytest.mark.parametrize("name", TWICE)
def test_a_command_that_changes_nothing_says_so_and_exits_with_1(db, name, answer, capsys):
    arguments = scene(name)
    run(name, *arguments, "--noinput")
    before = everything()
    asked = answer(None)
    text = f"Nothing was changed. {TWICE[name]}."
    for more in ([], ["--noinput"]):
        with pytest.raises(CommandError, match=re.escape(text)) as raised:
            run(name, *arguments, *more)
        assert raised.value.returncode == 1
    assert asked == []
    out = io.StringIO()
    with pytest.raises(CommandError, match=re.escape(text)):
        call_command(name, *arguments, "--noinput", "--format", "json", stdout=out)
    found = json.loads(out.getvalue())
    assert (found["dry_run"], found["changed"]) == (False, 0)
    assert run(name, *arguments, "--dry-run").endswith("Nothing was changed (--dry-run).\n")
    assert everything() == before, "nor is it on record"


@pytest.mark.parametrize(
    "name",
    [
        "queuepause", "queueresume", "queueseek", "queueset", "queueretry", "queuerelease", "queuedeadletter",
        "queuereplayrange",
    ],
)  # fmt: skip
def test_an_unknown_group_names_those_that_there_are(db, name):
    scene("queuepause")
    arguments = {"queueseek": "latest", "queueset": "claim_size=5", "queuerelease": "a", "queuedeadletter": "1"}
    arguments["queuereplayrange"] = "1"
    more = [arguments[name]] if name in arguments else []
    more *= 2 if name == "queuereplayrange" else 1
    with pytest.raises(CommandError, match=r"no group 'x' on topic 't'\. Registered: g on t"):
        run(name, "x", "t", *more, "--noinput")


def test_arguments_in_the_wrong_order_are_recognized(db):
    scene("queuepause")
    with pytest.raises(CommandError, match=r"Pass the group first, then the topic: g t$"):
        run("queuepause", "t", "g", "--noinput")


def test_a_mistyped_group_or_topic_is_guessed(db):
    groups.register(USING, GroupRef("mails", "orders"), mode="ordered", start="earliest")
    for arguments in (("mail", "orders"), ("mails", "order")):
        with pytest.raises(CommandError, match=r"Registered: mails on orders\. Did you mean mails on orders\?"):
            run("queuepause", *arguments, "--noinput")


@pytest.mark.parametrize("name", ["queueredrive", "queuediscard"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_unknown_names_of_dead_letters_are_errors(db, name, more):
    """A slip must not look as if there had been nothing to do."""
    letters = dead_letters(2)
    publish("orders", 1)
    groups.register(USING, GroupRef("mails", "t"), mode="ordered", start="earliest")
    before = everything()
    for arguments, text in (
        (["nope"], "There is no topic 'nope'. Topics: orders, t, t_dlq."),
        (["order"], "There is no topic 'order'. Topics: orders, t, t_dlq. Did you mean orders?"),
        (["order_dlq"], "There is no topic 'order_dlq'."),
        (
            ["t", "--group", "mail"],
            "There is no group 'mail' on topic 't', and t_dlq has no dead letters of a dropped one. Groups: g, mails.",
        ),
        (
            ["t", "--offset", str(letters[0]), "--offset", "99999"],
            "There is no dead letter of t_dlq at these offsets: 99999.",
        ),
    ):
        with pytest.raises(CommandError, match=re.escape(text)):
            run(name, *arguments, *(more or ["--noinput"]), *(["--reason", "x"] if name == "queuediscard" else []))
    assert everything() == before


def test_a_topic_is_known_by_whatever_there_is_of_it(db, settings):
    """In the log, in the outbox, collected, with a group, with settings; and its DLQ topic with it."""
    settings.MYSQLQUEUE = {"TOPICS": {"set": {"PARTITIONS": 2}}}
    log(1, "a", "logged")
    publish("waiting", 1)
    groups.register(USING, GroupRef("g", "read"), mode="ordered", start="earliest")
    CollectedTopic.objects.create(topic="collected", collected_offset=1, published_at=1)
    session = Session(USING)
    known = ["collected", "logged", "read", "set", "waiting"]
    assert service_log.known(session) == known
    for topic in known:
        for name in (topic, f"{topic}_dlq"):
            assert f"No dead letters of {dlq_topic(name)} match." in run("queueredrive", name, "--dry-run")
    many = [f"topic{number:02}" for number in range(30)]
    for topic in many:
        publish(topic, 1)
    with pytest.raises(CommandError, match=r"topic15 and 15 more\. Did you mean topic"):
        run("queueredrive", "topic", "--noinput")


def test_dead_letters_of_a_dropped_group_may_be_discarded(db):
    dead_letters(2)
    run("queuedropgroup", "g", "t", "--noinput")
    assert run_json("queuediscard", "t", "--group", "g", "--reason", "it is gone")["changed"] == 2
    with pytest.raises(CommandError, match=r"There is no group 'g' on topic 't'.*Groups: none\."):
        run("queuediscard", "t", "--group", "g", "--reason", "again", "--noinput")


def test_a_discard_needs_a_reason_and_a_dry_run_needs_none(db):
    dead_letters(2)
    assert "Dead letters of t_dlq that will be deleted: 2." in run("queuediscard", "t", "--dry-run")
    before = everything()
    for reason in ([], ["--reason", " "]):
        with pytest.raises(CommandError, match="--reason is required"):
            run("queuediscard", "t", "--noinput", *reason)
    assert everything() == before


def test_a_retry_of_what_does_not_wait_is_an_error(db):
    offset, other = log(2, "ab")
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=3600) if delivery.payload == 0 else None))
    sub.settle()
    with pytest.raises(CommandError, match=rf"are not waiting for another attempt in the group g/t: {other}, 99999\."):
        run("queueretry", "g", "t", *(f"--offset={one}" for one in (offset, other, 99999)), "--noinput")
    assert run_json("queueretry", "g", "t", "--offset", str(offset))["changed"] == 1


def test_a_retry_at_another_time_of_those_with_an_error(db):
    offsets = log(3, "ab")
    Sub(handler(function=lambda delivery: delivery.nack(3600, f"no {delivery.payload}"))).settle()
    arguments = ("queueretry", "g", "t", "--error", "no 1", "--at", "2090-01-01T12:00:00+00:00")
    assert "that will be retried at 2090-01-01 12:00:00+0000: 1." in run(*arguments, "--dry-run")
    assert run_json(*arguments)["changed"] == 1
    due = dict(DeliveryState.objects.values_list("message_offset", "invisible_until"))
    assert [due[offset] == 3_786_955_200_000 for offset in offsets] == [False, True, False]
    with pytest.raises(CommandError, match=r"Nothing was changed\. No messages of the group g/t with an error that"):
        run(*arguments, "--noinput")
    with pytest.raises(CommandError, match="'soon' is not a valid date and time"):
        run("queueretry", "g", "t", "--at", "soon", "--noinput")


def test_a_release_of_what_is_not_there_is_an_error(db):
    scene("queuerelease")
    before = everything()
    for more in (["--noinput"], ["--dry-run"]):
        with pytest.raises(CommandError, match=r"The group g/t has no leases on these partitions: 'b', 'c'\."):
            run("queuerelease", "g", "t", "a", "b", "c", *more)
        with pytest.raises(CommandError, match=r"There is no subscriber 'x'\. Subscribers: s:\d+\."):
            run("queuerelease", "--subscriber", "x", *more)
    assert everything() == before
    assert PartitionLease.objects.get().leased_by


def test_a_group_that_has_the_mode_already(db):
    groups.register(USING, GroupRef("g", "t"), mode="shared", start="earliest")
    with pytest.raises(CommandError, match=r"Nothing was changed\. The mode of the group g/t is already shared"):
        run("queuegroupmode", "g", "t", "shared", "--noinput")


def test_arguments_come_in_one_order():
    """The group, its topic, what is left; commands on messages begin with the topic."""
    order = {}
    for name, app in get_commands().items():
        if app == "django_mysqlqueue":
            parser = load_command_class(app, name).create_parser("manage.py", name)
            order[name] = [one.dest for one in parser._actions if not one.option_strings]
    on_groups = {
        "queuepause", "queueresume", "queueseek", "queueretry", "queuerelease", "queuedropgroup", "queuegroupmode",
        "queuedeadletter", "queueset", "queuereplayrange",
    }  # fmt: skip
    for name, arguments in order.items():
        if name in on_groups:
            assert arguments[:2] == ["group", "topic"], name
        else:
            assert "group" not in arguments, name
            assert "topic" not in arguments[1:], name
    assert order["queueredrive"] == order["queuediscard"] == ["topic"]


def test_pause_and_resume_twice(db):
    scene("queuepause")
    assert "The group g/t is paused." in run("queuepause", "g", "t", "--noinput")
    assert "is already paused" in run("queuepause", "g", "t", "--dry-run")
    assert "The group g/t is resumed." in run("queueresume", "g", "t", "--noinput")
    assert "is not paused" in run("queueresume", "g", "t", "--dry-run")


def test_dead_letter_says_what_it_is_about_and_does_all_or_nothing(db):
    _, _, first, second = scene("queuedeadletter")
    said = run("queuedeadletter", "g", "t", first, "--reason", "a test order", "--noinput")
    assert said == (
        "Messages of the group g/t that will be dead-lettered to t_dlq: 1.\n"
        f"Message {first} has failed 1 time.\n"
        "Dead letters get no further attempts until they are redriven.\n"
        "Messages dead-lettered to t_dlq: 1.\n"
    )
    operation = Operation.objects.get()
    assert (operation.detail, operation.reason) == (f"message {first}", "a test order")
    before = everything()
    for options in (["--noinput"], ["--dry-run"], ["--noinput", "--format", "json"]):
        with pytest.raises(CommandError, match=f"message {first} is already settled") as refused:
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
    assert f"The group g/t will continue from offset {last + 1} (latest)." in said
    assert "Settled messages that will be replayed: 0." in said
    assert "Unsettled messages that will be skipped: 3." in said
    assert "The group will never handle the messages that it skips." in said
    found = run_json("queueseek", "g", "t", str(last), "--dry-run")
    assert (found["offset"], found["skipped"], found["replayed"]) == (last, 2, 0)
    assert run_json("queueseek", "g", "t", str(last))["offset"] == last
    assert lag() == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "Pass one position"),
        (["latest", "--time", "2026-01-01"], "Pass one position"),
        (["--time", "yesterday"], "'yesterday' is not a valid date and time"),
        (["--time", "2026-13-01T00:00"], "is not a valid date and time"),
        (["first"], "must be 'earliest', 'latest' or an integer"),
        (["0"], "must be 'earliest', 'latest' or an integer"),
        (["999999999"], "the log ends at"),
    ],
)
def test_seek_to_nowhere(db, arguments, error):
    scene("queuepause")
    with pytest.raises(CommandError, match=error):
        run("queueseek", "g", "t", *arguments, "--noinput")
    assert not Operation.objects.exists()


def test_seek_in_a_log_that_gc_has_emptied(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    scene("queuepause")
    end = offsets_of()[-1]
    call_command("queuegc", stdout=io.StringIO())
    assert not offsets_of()
    assert run_json("queueseek", "g", "t", str(end))["offset"] == end
    assert run_json("queueseek", "g", "t", "latest")["offset"] == end + 1
    with pytest.raises(CommandError, match=f"offset {end + 2}: the log ends at {end}"):
        run("queueseek", "g", "t", str(end + 2), "--noinput")


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
    Sub(handler(group="h"))
    for some in (["--group", "h"], ["--since", "2100-01-01T00:00"], ["--until", "2001-01-01T00:00"]):
        with pytest.raises(CommandError, match=r"Nothing was changed\. No dead letters of t_dlq match"):
            run("queueredrive", "t", *some, "--noinput")
    assert run_json("queueredrive", "t", "--rate", "1000", "--limit", "5")["changed"] == 1
    for bad, text in (
        ("--rate", r"rate 0\.0: must be more than 0"),
        ("--limit", "limit 0: must be an integer of at least 1"),
    ):
        with pytest.raises(CommandError, match=text):
            run("queueredrive", "t", bad, "0", "--noinput")


def test_scheduled_messages_are_listed(db):
    assert run("queuescheduled") == "No messages are scheduled.\n"
    publish("t", 1, delay=1000, id="tea")
    publish("u", 1, delay=2000, id="cup")
    assert re.fullmatch(r"20\d\d-.*  t  tea\n", run("queuescheduled", "t"))
    found = json.loads(run("queuescheduled", "--format", "json"))["scheduled"]
    assert [(one["topic"], one["id"]) for one in found] == [("t", "tea"), ("u", "cup")]
    with pytest.raises(CommandError, match="require the topic and ids"):
        run("queuescheduled", "t", "--now")
    with pytest.raises(CommandError, match="--key"):
        run("queuescheduled", "t", "--key", "a")
    with pytest.raises(CommandError, match="--limit -5: must be at least 1"):
        run("queuescheduled", "--limit", "-5")
    for when in ([], ["--now", "--at", "2030-01-01T00:00"]):
        with pytest.raises(CommandError, match="Pass --now or --at"):
            run("queuescheduled", "t", "tea", *when)


def test_scheduled_messages_are_changed_by_their_published_ids(db):
    for key in "ab":
        publish("t", key, key=key, id="tea", delay=1000)
    publish("t", 1, id="cup", delay=1000)
    publish("u", 1, id="tea", delay=1000)
    assert "00:00-0600: 1." in run("queuescheduled", "t", "tea", "--key", "a", "--at", "2100-01-01T00:00", "--noinput")
    assert "00:00-0600: 2." in run("queuescheduled", "t", "tea", "--at", "2100-01-02T00:00", "--noinput")
    assert "Scheduled messages cancelled: 1." in run("queuecancel", "t", "tea", "--key", "b", "--noinput")
    assert "Scheduled messages that are due now: 1." in run("queuescheduled", "t", "cup", "--now", "--noinput")
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
        (["t", "cup"], r"Nothing was changed. Not scheduled in topic 't': 'cup'"),
        (["t", "at once", "--dry-run"], "Not scheduled in topic 't': 'at once'"),
        (["t", "tea", "--key", "a"], "Not scheduled in topic 't': 'tea'"),
    ):
        with pytest.raises(CommandError, match=error):
            run(name, *arguments, *more, "--noinput")
    assert everything() == before
    out = io.StringIO()
    with pytest.raises(CommandError, match=r"Not scheduled in topic 't': 'cup'"):
        call_command(name, "t", "cup", "tea", *more, "--noinput", "--format", "json", stdout=out)
    found = json.loads(out.getvalue())
    assert (found["changed"], found["not_scheduled"]) == (1, ["cup"])
    with pytest.raises(CommandError, match=r"Nothing was changed. Not scheduled in topic 't': 'tea'"):
        run(name, "t", "tea", *more, "--noinput")


def test_jobs_are_cancelled_by_their_ids(db, settings):
    settings.TASKS = job_worlds.TASKS
    job_worlds.claimed("runs", "waits")
    JobResult.objects.filter(id="waits").update(status="READY")
    job_worlds.scheduled("later")
    publish("jobs.default", 1, id="of plain SQL", delay=1000)
    call = partial(run, "queuecancel", "jobs.default", "--noinput")
    with pytest.raises(CommandError, match=r"Nothing was changed. Neither waiting nor running in topic .*: 'none'"):
        call("none")
    with pytest.raises(CommandError, match=r"Not scheduled in topic 'jobs.default': 'waits'"):
        call("waits", "--key", "a")
    said = call("runs", "waits", "later", "of plain SQL", "--reason", "wrong prices")
    assert "Jobs cancelled: 3." in said
    assert (
        "Running jobs that were asked to stop: 1.\nRunning jobs stop only if their tasks read context.cancelled."
        in said
    )
    assert not OutboxMessage.objects.exists()
    assert job_worlds.statuses() == {"later": "FAILED", "runs": "RUNNING", "waits": "FAILED"}
    row = Operation.objects.get()
    assert (row.action, row.topic, row.changed, row.detail, row.reason) == (
        "cancel jobs",
        "jobs.default",
        4,
        "asked to stop: 1",
        "wrong prices",
    )
    for name, error in (
        ("runs", "Nothing was changed. Jobs that will not be changed, because they have ended or were asked to stop"),
        ("waits", "Nothing was changed. Neither waiting nor running"),
    ):
        with pytest.raises(CommandError, match=error):
            call(name)
    assert Operation.objects.count() == 1


@pytest.mark.parametrize("name", ["queuecancel", "queuescheduled"])
def test_a_message_that_comes_due_during_the_question_is_named(db, monkeypatch, name):
    for one in ("tea", "cup"):
        publish("t", 1, id=one, delay=1000)

    def comes_due(question):
        OutboxMessage.objects.filter(message_id="cup").update(deliver_at=1)
        return "y"

    monkeypatch.setattr("builtins.input", comes_due)
    with pytest.raises(CommandError, match=r"Not scheduled in topic 't': 'cup'"):
        run(name, "t", "tea", "cup", *(["--now"] if name == "queuescheduled" else []))
    assert Operation.objects.get().changed == 1


def test_a_list_of_an_unknown_topic_is_an_error(db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"planned": {"PARTITIONS": 2}}}
    with pytest.raises(CommandError, match="There is no topic 'nope'"):
        run("queuescheduled", "nope")
    publish("used", 1)
    sequence()
    groups.register(USING, GroupRef("g", "read"), mode="ordered", start="earliest")
    for topic in ("planned", "used", "read"):
        assert run("queuescheduled", topic) == "No messages are scheduled.\n"


@pytest.mark.servers_only
def test_a_command_that_another_transaction_keeps_from_its_message_fails(db):
    publish("t", 1, id="tea", delay=1000)
    with transaction.atomic():
        assert cancel("tea", topic="t") == 1
        with pytest.raises(CommandError, match="another transaction is changing them: 1"):
            in_thread(lambda: run("queuecancel", "t", "tea", "--noinput"))


def test_release_wants_to_know_what(db, clock):
    for arguments in ([], ["g", "t", "a", "--subscriber", "x"]):
        with pytest.raises(CommandError, match=r"Pass either partitions \(GROUP"):
            run("queuerelease", *arguments)
    with pytest.raises(CommandError, match="Pass the partitions"):
        run("queuerelease", "g", "t")
    log(1)
    sub = Sub(handler())
    with pytest.raises(CommandError, match="is alive"):
        run("queuerelease", "--subscriber", sub.name, "--noinput")
    clock.advance(31)
    assert "is forgotten; its leases are released." in run("queuerelease", "--subscriber", sub.name, "--noinput")


def test_who_did_it_when_the_user_has_no_name(db, monkeypatch):
    import getpass

    def nameless():
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    scene("queuepause")
    run("queuepause", "g", "t", "--noinput")
    assert Operation.objects.get().actor.startswith("uid ")
