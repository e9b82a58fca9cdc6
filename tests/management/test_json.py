"""--format json: one document on stdout, for each command."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.db import connection

from django_mysqlqueue import publish, publish_many
from django_mysqlqueue.models import QueueMessage, Reader, SubscriberHeartbeat
from tests.support.commands import run
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler, sequence

APP = "django_mysqlqueue"
READ = {
    "queuehealth": ["--max-lag", "9000"],
    "queueoperations": [],
    "queuequarantine": [],
    "queuerecurring": [],
    "queuescheduled": [],
    "queueset": [],
    "queuestatus": [],
    "queuetail": ["t", "--limit", "1"],
}
"""Commands that only read, with arguments."""
CHANGE = {
    "queuecancel": ["t", "tea"],
    "queuedeadletter": ["g", "t", "--id", "milk"],
    "queuediscard": ["lost"],
    "queuedropgroup": ["g", "t"],
    "queuedropreader": ["lake"],
    "queueerase": ["t", "--key", "eva"],
    "queuegroupmode": ["g", "t", "shared"],
    "queuepause": ["g", "t"],
    "queueredrive": ["lost"],
    "queuerelease": ["g", "t", "a"],
    "queuereplayrange": ["g", "t"],
    "queueresume": ["g", "t"],
    "queueretry": ["g", "t"],
    "queuescheduled": ["t", "tea", "--now"],
    "queueseek": ["g", "t", "earliest"],
    "queueset": ["g", "t", "max_attempts=9"],
}
"""Commands that preview operations, with arguments."""
OTHER = {
    "queuegc": ["--dry-run"],
    "queuegrants": ["--role", "publisher"],
    "queueprocedures": ["--check"],
    "queuesequence": [],
}
MOVE = {"queuemove"}
"""Tested with several databases, in tests/databases."""
SPARK = {"queuearchive", "queuereplay", "queuereport"}
"""Tested with Spark, in tests/pipeline."""
NEVER = {"runsubscriber"}
"""Its output is a log, whose format LOGGING sets."""
RESULT = {"database", "operation", "dry_run", "planned", "changed", "summary", "warnings"}


def commands():
    return {name for name, app in get_commands().items() if app == APP}


@pytest.fixture
def world(db):
    """Something for each command to do."""
    publish("t", 0, id="milk")
    publish("lost", 1)
    Sub(handler(function=lambda delivery: delivery.nack(delay=3600)), handler(topic="lost", function=fail)).settle()
    publish("t", 1, id="tea", delay=1000)
    Reader.objects.create(name="lake", read_offset=10**9)
    publish_many("t", range(2))
    publish("t", 2, key="eva")
    sequence()


@pytest.mark.any_engine
def test_every_command_is_tested():
    assert commands() == {*READ, *CHANGE, *OTHER} | MOVE | SPARK | NEVER


@pytest.mark.any_engine
def test_every_command_but_one_has_the_option():
    for name in commands() - NEVER:
        parser = load_command_class(APP, name).create_parser("manage.py", name)
        (option,) = (one for one in parser._actions if "--format" in one.option_strings)
        assert option.choices == ("text", "json")
        assert option.default == (None if name == "queuetail" else "text"), "a pipe of messages is JSON without it"


@pytest.mark.parametrize(("name", "arguments"), READ.items(), ids=READ)
def test_a_command_that_reads_writes_one_document(world, name, arguments):
    found = json.loads(run(name, *arguments, "--format", "json"))
    assert found["offset"] if name == "queuetail" else found["database"] == USING


@pytest.mark.parametrize(("name", "arguments"), CHANGE.items(), ids=CHANGE)
def test_the_preview_of_an_operation_is_one_document(world, name, arguments):
    if name == "queueresume":
        run("queuepause", "g", "t", "--noinput")
    if name == "queuerelease":
        publish("t", 3, key="a")
        sequence()
        Sub(handler()).step()
    if name == "queuegroupmode":
        SubscriberHeartbeat.objects.all().delete()
    if name == "queuereplayrange":
        offsets = QueueMessage.objects.filter(topic="t").values_list("offset", flat=True)
        arguments = [*arguments, str(min(offsets)), str(max(offsets))]
    found = json.loads(run(name, *arguments, "--dry-run", "--format", "json"))
    assert found.keys() >= RESULT
    assert (found["dry_run"], found["changed"]) == (True, 0)
    assert found["planned"] > 0
    assert found["summary"]
    assert all(one.endswith(".") for one in (*found["summary"], *found["warnings"]))


def test_the_result_of_an_operation(world):
    found = json.loads(run("queueseek", "g", "t", "earliest", "--noinput", "--format", "json"))
    assert found.keys() >= RESULT
    assert (found["operation"], found["dry_run"], found["changed"]) == ("seek", False, 1)
    (text,) = found["summary"]
    assert text.startswith("The group g/t continues")


def test_gc(world, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    publish("nobody", 1)
    sequence()
    before = QueueMessage.objects.count()
    planned = json.loads(run("queuegc", "--dry-run", "--format", "json"))
    assert QueueMessage.objects.count() == before
    done = json.loads(run("queuegc", "--format", "json"))
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    assert planned["messages"] == done["messages"] == before - QueueMessage.objects.count() > 0
    assert "nobody" in [one["topic"] for one in done["topics_without_group"]]


def test_sequence(db):
    publish_many("t", range(3))
    assert json.loads(run("queuesequence", "--format", "json")) == {
        "database": USING,
        "moved": 3,
        "replaced": 0,
        "quarantined": 0,
        "busy": False,
    }


@pytest.mark.servers_only
def test_grants(db):
    found = json.loads(run("queuegrants", "--role", "publisher", "--user", "shop@10.%", "--format", "json"))
    assert (found["role"], found["user"], found["host"]) == ("publisher", "shop", "10.%")
    text = run("queuegrants", "--role", "publisher", "--user", "shop@10.%")
    assert [f"{one};" for one in found["statements"]] == text.splitlines()[1:]


@pytest.mark.servers_only
def test_procedures(db):
    def read(*arguments):
        return json.loads(run("queueprocedures", *arguments, "--format", "json"))

    run("queueprocedures", "--remove")
    out = io.StringIO()
    with pytest.raises(SystemExit):
        call_command("queueprocedures", "--check", "--format", "json", stdout=out)
    missing = json.loads(out.getvalue())
    assert missing["up_to_date"] is False
    assert read()["installed"] == missing["installed"] != []
    assert read("--check") == {
        "database": USING, "up_to_date": True, "sysdate_is_now": False, "installed": [], "replaced": [], "removed": [],
    }  # fmt: skip
    statements = read("--print")["statements"]
    assert f"DROP PROCEDURE IF EXISTS {missing['installed'][0]}" in statements
    assert read("--remove")["removed"] == missing["installed"]


@pytest.mark.parametrize("name", ["queuegrants", "queueprocedures"])
def test_an_error_leaves_stdout_empty(db, name):
    if connection.vendor == "mysql":
        pytest.skip("SQLite has neither users nor procedures")
    out = io.StringIO()
    with pytest.raises(CommandError, match="which has no"):
        call_command(name, *OTHER[name], "--format", "json", stdout=out)
    assert not out.getvalue()
