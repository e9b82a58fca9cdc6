"""Commands where topics are in several databases."""

from __future__ import annotations

import io
import json
import re

import pytest
from django.core.management import BaseCommand, CommandError, call_command
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import publish
from django_mysqlqueue.models import ConsumerGroup, Operation, PartitionLease, SubscriberHeartbeat
from tests.databases.test_commands import OPERATIONS
from tests.support.internals import GroupRef, groups
from tests.support.queue_alias import command, on_queue

QUEUE = "queue"
TOPICS = {"orders": {"DATABASE": QUEUE}, "events.*": {"DATABASE": QUEUE}}
BROKEN = {**TOPICS, "lost": {"DATABASE": "other"}}
"""The alias ``other`` has no tables."""
NO_TABLES = "Database 'other' does not have the queue's tables. Run manage.py migrate --database other."


@pytest.fixture
def topics(queue_db, settings):
    """One message and one group in each database."""
    settings.MYSQLQUEUE = {"TOPICS": TOPICS}
    publish("mails", 1)
    publish("orders", 1)
    groups.register("default", GroupRef("g", "mails"), mode="ordered", start="earliest")
    groups.register(QUEUE, GroupRef("g", "orders"), mode="ordered", start="earliest")


def run(*arguments, **options):
    """Returns what a command wrote, and the error with which it ended; an exit status is an error too."""
    out = io.StringIO()
    try:
        call_command(*arguments, stdout=out, no_color=True, **options)
    except CommandError as error:
        return out.getvalue(), str(error)
    except SystemExit as end:
        return out.getvalue(), end.code
    return out.getvalue(), None


def sections(text):
    """What is below each heading, by alias."""
    first, *parts = re.split(r"^Database '(\w+)'\n", text, flags=re.MULTILINE)
    assert not first
    return dict(zip(parts[::2], parts[1::2], strict=True))


def health(*arguments):
    """The sections of queuehealth without notes: here nothing subscribes."""
    lines = run("queuehealth", *arguments)[0].splitlines(True)
    return sections("".join(line for line in lines if not line.startswith(("note", "     "))))


# -- commands on a topic --------------------------------------------------------


def test_a_command_works_where_its_topic_is(topics):
    publish("orders", 2, id="later", delay=1000)
    command("queuesequence")
    PartitionLease.objects.using(QUEUE).create(consumer_group="g", topic="orders", partition_key="k", leased_by="s:1")
    # tests/schedules/test_databases.py: a schedule is where its messages are. The last two read all databases.
    others = ("queuerecurring", "queuecancel jobs", "queueoperations", "queuequarantine", "queuedropreader")
    for line, said in [one for one in OPERATIONS if not one[0].startswith(others)]:
        words = line.replace(" t", " orders", 1).split() if " t" in line else [*line.split(), "orders"]
        assert said.replace('"t"', '"orders"') in command(*words), line
    assert "is now shared" in command("queuegroupmode", "g", "orders", "shared", "--noinput")
    assert "is dropped." in command("queuedropgroup", "g", "orders", "--noinput")
    assert Operation.objects.using("default").count() == 0
    assert on_queue(Operation) > 5
    assert (on_queue(ConsumerGroup), ConsumerGroup.objects.using("default").count()) == (0, 1)


def test_a_dlq_topic_is_where_its_topic_is(topics):
    assert "No dead letter" in command("queueredrive", "orders_dlq", "--dry-run")
    assert "'orders'" in run("queuepause", "g", "orders", "--database", "default", "--noinput")[1]


def test_the_option_decides_before_the_topic(topics):
    _, error = run("queuepause", "g", "orders", "--noinput", "--database", "default")
    assert error.startswith("There is no group 'g' on topic 'orders'")
    assert on_queue(Operation) == 0


# -- commands on the whole queue --------------------------------------------------


def test_each_database_has_a_section(topics):
    assert command("queuesequence") == "Database 'default'\nMoved 1 message.\n\nDatabase 'queue'\nMoved 1 message.\n"
    status = sections(command("queuestatus"))
    assert list(status) == ["default", QUEUE]
    assert "Queue in database 'default'" in status["default"]
    assert "mails" in status["default"]
    assert "orders" not in status["default"]
    assert "orders" in status[QUEUE]
    assert "mails" not in status[QUEUE]
    assert [text.strip() for text in health().values()] == ["Healthy: 1 group, backlog 1, outbox 0."] * 2
    assert [*sections(command("queuegc"))] == ["default", QUEUE]
    assert command("queuegc", "--dry-run").count("Would delete 0 messages.") == 2
    assert command("queuescheduled").count("No messages are scheduled.") == 2
    assert command("queueset").count("No options are overridden.") == 2


def test_one_database_has_none(topics, settings):
    for setting in ({}, {"DATABASE": QUEUE}, {"TOPICS": {"a": {"DATABASE": "default"}}}):
        settings.MYSQLQUEUE = setting
        assert "Database '" not in command("queuestatus") + command("queuesequence") + command("queuehealth")
    settings.MYSQLQUEUE = {"TOPICS": TOPICS}
    assert "Healthy: 1 group, backlog 1, outbox 0." in command("queuehealth", "--database", QUEUE)
    for words in (["queuestatus"], ["queuehealth"], ["queuegc"]):
        assert "Database '" not in command(*words, "--database", QUEUE)


def test_one_database_costs_no_further_query(topics, settings):
    command("queuesequence")

    def queries(*arguments):
        with CaptureQueriesContext(connection) as captured:
            command(*arguments)
        return len(captured)

    settings.MYSQLQUEUE = {}
    for words in (["queuestatus"], ["queuehealth"], ["queuescheduled"], ["queueset"], ["queuesequence"]):
        assert queries(*words) == queries(*words, "--database", "default"), words


def test_json_of_several_databases(topics):
    command("queuesequence")
    publish("orders", 2, id="later", delay=1000)
    status = json.loads(command("queuestatus", "--format", "json"))["databases"]
    assert [(one["database"], one["groups"][0]["topic"], one["groups"][0]["lag"]) for one in status] == [
        ("default", "mails", 1),
        (QUEUE, "orders", 1),
    ]
    assert status[1].keys() == json.loads(command("queuestatus", "--format", "json", "--database", QUEUE)).keys()
    found = json.loads(command("queuehealth", "--format", "json"))
    assert found["healthy"] is True
    assert [(one["database"], one["healthy"]) for one in found["databases"]] == [("default", True), (QUEUE, True)]
    scheduled = json.loads(command("queuescheduled", "--format", "json"))["databases"]
    assert [[row["id"] for row in one["scheduled"]] for one in scheduled] == [[], ["later"]]
    command("queueset", "g", "orders", "max_attempts=3", "--noinput")
    options = json.loads(command("queueset", "--format", "json"))["databases"]
    assert [[row["option"] for row in one["options"]] for one in options] == [[], ["max_attempts"]]


def test_a_database_that_fails_hides_no_other(topics, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"lost": {"DATABASE": "other"}, **TOPICS}}
    for words in (["queuestatus"], ["queuegc"], ["queuesequence"], ["queuescheduled"], ["queueset"]):
        out, error = run(*words)
        assert error == "Failed on 1 of 3 databases: 'other'."
        found = sections(out)
        assert list(found) == ["default", "other", QUEUE]
        assert found["other"].strip() == NO_TABLES
        assert found[QUEUE].strip()
    out, code = run("queuehealth")
    assert code == 1
    assert sections(out)["other"].strip() == NO_TABLES
    assert "Healthy" in sections(out)[QUEUE]
    out, code = run("queuehealth", "--format", "json")
    assert code == 1
    found = json.loads(out)
    assert found["healthy"] is False
    assert [one.get("error") for one in found["databases"]] == [None, NO_TABLES, None]
    out, error = run("queuestatus", "--format", "json")
    assert [one.get("error") for one in json.loads(out)["databases"]] == [None, NO_TABLES, None]
    assert error == "Failed on 1 of 3 databases: 'other'."


def test_checks_that_cannot_be_run_hide_no_other_database(topics, settings, monkeypatch):
    """Since Django 6.1, system checks query each database, whichever the command works on."""

    def ask(*arguments, **options):
        gone = connections["other"].copy("other")
        gone.settings_dict = {**gone.settings_dict, "NAME": "/nowhere/nothing"}
        gone.ensure_connection()

    monkeypatch.setattr(BaseCommand, "check", ask)
    said = io.StringIO()
    assert "is paused." in command("queuepause", "g", "orders", "--noinput", skip_checks=False, stderr=said)
    assert said.getvalue().startswith("System checks were not run: The database that DATABASES names for 'other' ")
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    with pytest.raises(CommandError, match=r"^The database that DATABASES names for 'other' .*: unable to open"):
        command("queueresume", "g", "orders", "--noinput", skip_checks=False)


@pytest.mark.servers_only
def test_system_checks_wait_for_no_database_without_a_limit(topics, monkeypatch):
    limits = {}

    def ask(*arguments, **options):
        for alias in ("default", QUEUE):
            limits[alias] = connections[alias].settings_dict["OPTIONS"].get("read_timeout")

    monkeypatch.setattr(BaseCommand, "check", ask)
    command("queuepause", "g", "orders", "--noinput", skip_checks=False)
    assert limits == {"default": 60, QUEUE: 60}
    assert "read_timeout" not in connections["default"].settings_dict["OPTIONS"]


# -- queuehealth ------------------------------------------------------------------


def test_a_problem_in_one_database_is_unhealthy(topics):
    command("queuesequence")
    out, code = run("queuehealth", "--max-lag", "0")
    assert code == 1
    assert [text.count("PROBLEM") for text in sections(out).values()] == [1, 1]
    publish("orders", 1)
    command("queuesequence")
    out, code = run("queuehealth", "--max-lag", "1")
    assert code == 1
    assert "Healthy" in sections(out)["default"]
    assert "PROBLEM  The backlog of g/orders is 2" in sections(out)[QUEUE]


def test_selected_groups_may_be_in_any_database(topics):
    groups.register(QUEUE, GroupRef("late", "orders"), mode="ordered", start="earliest")
    command("queuesequence")
    found = health("--group", "late")
    assert found["default"].strip() == "None of the selected groups is registered here."
    assert found[QUEUE].startswith("Healthy: 1 group, backlog 1")
    assert run("queuehealth", "--group", "later") == (
        sections_of_nothing(),
        "No group 'later' is registered. Registered: g, late.",
    )
    assert "Healthy: 2 groups, backlog 2, outbox 0." in command("queuehealth", "--topic", "orders")
    assert [*sections(command("queuehealth", "--topic", "orders", "--topic", "mails"))] == [QUEUE, "default"]
    _, error = run("queuehealth", "--topic", "orders", "--topic", "mails", "--group", "nobody")
    assert error == "No group 'nobody' is registered. Registered: g, late."


def sections_of_nothing():
    text = "None of the selected groups is registered here.\n"
    return f"Database 'default'\n{text}\nDatabase 'queue'\n{text}"


def test_a_database_without_selected_groups_has_no_problems(topics, clock):
    """Its outbox is stuck, which is a problem of every group there, but of none elsewhere."""
    groups.register(QUEUE, GroupRef("late", "lates"), mode="ordered", start="earliest")
    command("queuesequence", "--database", QUEUE)
    clock.advance(60)
    assert run("queuehealth", "--group", "late")[1] is None
    out, code = run("queuehealth")
    assert code == 1
    assert "PROBLEM" in sections(out)["default"]


def test_a_topic_in_a_sound_database_does_not_need_the_others(topics, settings):
    settings.MYSQLQUEUE = {"TOPICS": BROKEN}
    assert run("queuehealth", "--topic", "orders")[1] is None
    assert run("queuehealth", "--group", "g")[1] == 1


# -- others -------------------------------------------------------------------------


def test_a_subscriber_is_forgotten_where_it_is_known(topics):
    for alias in ("default", QUEUE):
        SubscriberHeartbeat.objects.using(alias).create(
            subscriber_name="w:1", consumer_group="g", topic="t", heartbeat_at=0
        )
    SubscriberHeartbeat.objects.using(QUEUE).create(
        subscriber_name="w:2", consumer_group="g", topic="t", heartbeat_at=0
    )
    found = sections(command("queuerelease", "--subscriber", "w:2", "--noinput"))
    assert found["default"].strip() == "There is no subscriber 'w:2' here."
    assert "w:2 is forgotten" in found[QUEUE]
    assert command("queuerelease", "--subscriber", "w:1", "--noinput").count("w:1 is forgotten") == 2
    assert run("queuerelease", "--subscriber", "w:3", "--noinput")[1].startswith("There is no subscriber 'w:3' in any")


def test_a_subscriber_is_forgotten_where_it_is_known_in_json(topics):
    arguments = ("queuerelease", "--subscriber", "w:2", "--noinput", "--format", "json")
    out, error = run(*arguments)
    assert [one["changed"] for one in json.loads(out)["databases"]] == [0, 0]
    assert error.startswith("There is no subscriber 'w:2' in any")
    SubscriberHeartbeat.objects.using(QUEUE).create(
        subscriber_name="w:2", consumer_group="g", topic="t", heartbeat_at=0
    )
    default, queue = json.loads(command(*arguments))["databases"]
    assert (default["database"], default["operation"], default["changed"]) == ("default", "forget", 0)
    assert default["summary"] == ["There is no subscriber 'w:2' here."]
    assert (queue["database"], queue["operation"], queue["changed"]) == (QUEUE, "forget", 1)


def test_json_of_commands_that_work_on_one_database_after_another(topics, settings):
    """With several databases, it is one document."""
    found = json.loads(command("queuesequence", "--format", "json"))
    assert [(one["database"], one["moved"]) for one in found["databases"]] == [("default", 1), (QUEUE, 1)]
    settings.MYSQLQUEUE = {"TOPICS": BROKEN, "RETENTION": 0}
    out, error = run("queuegc", "--dry-run", "--format", "json")
    found = {one["database"]: one for one in json.loads(out)["databases"]}
    assert found["default"]["dry_run"] is True
    assert found["other"] == {"database": "other", "error": NO_TABLES}
    assert error == "Failed on 1 of 3 databases: 'other'."


@pytest.mark.servers_only
def test_procedures_of_each_database(topics, no_procedures):
    assert command("queueprocedures").count("Installed ") == 2
    command("queueprocedures", "--remove", "--database", QUEUE)
    out, error = run("queueprocedures", "--check")
    assert sections(out)["default"].strip() == "The procedures are up to date."
    assert sections(out)[QUEUE].startswith("To be installed: ")
    assert error == "Failed on 1 of 2 databases: 'queue'."
    assert run("queueprocedures", "--print")[1].startswith("--print prints the statements for one database")
    command("queueprocedures", "--remove")


@pytest.mark.servers_only
def test_grants_of_each_database(topics):
    out = command("queuegrants", "--role", "reader")
    assert [line for line in out.splitlines() if line.startswith("-- Database")] == [
        "-- Database 'default'",
        "-- Database 'queue'",
    ]
    assert all(line.startswith("-- ") or line.endswith(";") for line in out.splitlines() if line)
    assert "_queue" in out


# -- Spark --------------------------------------------------------------------------


def test_a_replay_into_another_database_is_refused(topics):
    with pytest.raises(CommandError) as caught:
        command("queuereplay", topic="orders", to="mails", path="/nowhere")
    assert str(caught.value) == (
        "--to mails: this topic is in database 'default', but the archive of topic orders is that of 'queue', and "
        "copies are published there. Choose a topic in 'queue'."
    )


def test_a_report_is_about_one_database(topics, tmp_path):
    with pytest.raises(CommandError, match="these topics are in 'queue', 'default': make a report for each"):
        command("queuereport", out=str(tmp_path), topic=["orders", "mails"])
    with pytest.raises(CommandError, match=r"no topic 'events\.x'"):
        command("queuereport", out=str(tmp_path), topic=["orders", "events.x"])


def test_the_output_names_the_archived_database(topics, tmp_path):
    path = str(tmp_path / "archive")
    assert command("queuearchive", "status", path=path).startswith("Database 'default'\nArchive ")
    assert command("queuearchive", "status", path=path, database=QUEUE).startswith("Database 'queue'\nArchive ")
    assert json.loads(command("queuearchive", "status", path=path, database=QUEUE, format="json"))["database"] == QUEUE
