"""queueoperations, and who paused a group in queuestatus."""

from __future__ import annotations

import json
import re

import pytest
from django.core.management import CommandError

from django_mysqlqueue import operations
from django_mysqlqueue.inspection import operations_log
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import ConsumerGroup, Operation
from tests.support.commands import run, table
from tests.support.harness import USING
from tests.support.internals import GroupRef, groups

HEADER = ["started at", "operation", "state", "group", "topic", "by", "reason", "changed", "duration", "arguments"]


def record(action="pause", **columns):
    """An operation in the audit log that has ended."""
    given = {"consumer_group": "g", "topic": "t", "actor": "ada", "ended_at": 5}
    return Operation.objects.create(action=action, **given | columns)


def listed(*arguments):
    return json.loads(run("queueoperations", "--format", "json", *arguments))["operations"]


def test_the_last_operation_is_first_with_who_why_and_whether_it_finished(db):
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    assert run("queueoperations") == "No operations were found.\n"
    operations.pause("g", "t", actor="ada", reason="the warehouse moves")
    record("redrive", topic="t_dlq", changed=120, total=2000, ended_at=0, actor="eve")
    record("discard", changed=7, total=9, ended_at=0, started_at=1)
    header, *rows = [re.split(r"  +", line.strip()) for line in run("queueoperations").splitlines()]
    assert header == HEADER
    discard, redrive, pause = (dict(zip(HEADER, row, strict=True)) for row in rows)
    assert (pause["operation"], pause["state"], pause["by"]) == ("Pause group", "finished", "ada")
    assert (pause["group"], pause["topic"], pause["reason"]) == ("g", "t", "the warehouse moves")
    assert (redrive["state"], redrive["changed"]) == ("running", "120 of 2,000 dead letters")
    assert redrive["duration"].endswith("so far")
    assert (discard["state"], discard["changed"]) == ("interrupted", "7 of 9 dead letters")
    assert discard["duration"].startswith("no progress for ")
    found = listed()
    assert [(one["action"], one["state"]) for one in found] == [
        ("discard", "interrupted"),
        ("redrive", "running"),
        ("pause", "finished"),
    ]
    assert (found[2]["by"], found[2]["reason"]) == ("ada", "the warehouse moves")
    assert 0 < found[2]["started_at"] <= found[2]["ended_at"]


def test_filters(db):
    kept = {
        "pause": record("pause").id,
        "dlq": record("redrive", topic="t_dlq", consumer_group="").id,
        "eve": record("seek", topic="u", consumer_group="h", actor="eve").id,
        "runs": record("drop", topic="u", ended_at=0).id,
        "lost": record("drop", topic="u", ended_at=0, started_at=1).id,
    }
    names = {number: name for name, number in kept.items()}

    def named(*arguments):
        return [names[one["id"]] for one in listed(*arguments)]

    assert named() == ["lost", "runs", "eve", "dlq", "pause"]
    assert named("--limit", "2") == ["lost", "runs"]
    assert named("--topic", "t") == ["dlq", "pause"]
    assert named("--group", "h") == ["eve"]
    assert named("--by", "eve") == ["eve"]
    assert named("--action", "drop") == ["lost", "runs"]
    assert named("--running") == ["runs"]
    assert named("--interrupted") == ["lost"]
    assert named("--interrupted", "--topic", "t") == []


def test_a_filter_that_matches_few_is_searched_to_the_end_by_bounded_statements(db, monkeypatch):
    monkeypatch.setattr(
        operations_log.look, "__kwdefaults__", {**operations_log.look.__kwdefaults__, "bounds": Bounds(operations=3)}
    )
    first = record(actor="eve").id
    for _number in range(7):
        record()
    assert [one["id"] for one in listed("--by", "eve")] == [first]
    assert len(listed("--by", "ada", "--limit", "5")) == 5


def test_arguments_are_redacted(db, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "REDACT": f"{__name__}.star"}
    record("redrive", detail="error contains 'secret'")
    assert "secret" not in run("queueoperations") + json.dumps(listed())
    assert listed()[0]["arguments"] == "error contains '***'"


def star(text, *, topic, kind):
    return text.replace("secret", "***") if (topic, kind) == ("t", "error") else text


@pytest.mark.parametrize("arguments", [("--limit", "0"), ("--action", "paus"), ("--running", "--interrupted")])
def test_what_is_refused(db, arguments):
    with pytest.raises(CommandError):
        run("queueoperations", *arguments)


def test_the_status_says_who_paused_a_group_when_and_why(db):
    for name in ("g", "h", "i"):
        groups.register(USING, GroupRef(name, "t"), mode="ordered", start="earliest")
    assert "Paused groups" not in run("queuestatus", "--all")
    operations.pause("g", "t", actor="bob", reason="for a minute")
    operations.resume("g", "t", actor="bob")
    operations.pause("g", "t", actor="ada", reason="the warehouse moves")
    operations.pause("h", "t", actor="eve")
    operations.resume("h", "t", actor="eve")
    ConsumerGroup.objects.filter(consumer_group__in=("h", "i")).update(paused=True)  # by plain SQL
    (row,) = table(run("queuestatus", "--all"), "Paused groups")
    assert (row["group"], row["topic"], row["by"], row["reason"]) == ("g", "t", "ada", "the warehouse moves")
    found = {one["group"]: one["pause"] for one in json.loads(run("queuestatus", "--format", "json"))["groups"]}
    at = Operation.objects.get(actor="ada").started_at
    assert found == {"g": {"by": "ada", "at": at, "reason": "the warehouse moves"}, "h": None, "i": None}
    # Registered again: who has paused its predecessor has not paused it.
    ConsumerGroup.objects.filter(consumer_group="g").update(registered_at=2**41)
    assert "Paused groups" not in run("queuestatus", "--all")
