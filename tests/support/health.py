"""What queuehealth and queuestatus say."""

from __future__ import annotations

import io
import json

from django.core.management import call_command

from django_mysqlqueue import Message, publish_many
from tests.support.harness import USING, sequence
from tests.support.internals import GroupRef, groups


def run(*arguments):
    """(exit code, output)"""
    output = io.StringIO()
    try:
        call_command("queuehealth", *arguments, stdout=output, no_color=True)
    except SystemExit as end:
        return end.code, output.getvalue()
    return 0, output.getvalue()


def queuestatus():
    output = io.StringIO()
    call_command("queuestatus", "--format", "json", stdout=output)
    return json.loads(output.getvalue())


def register(*refs):
    for group, topic in refs or (("g", "t"),):
        groups.register(USING, GroupRef(group, topic), mode="ordered", start="earliest")


def backlog(count=3, topic="t"):
    publish_many(topic, [Message(n, key="secret-key") for n in range(count)])
    sequence()


def kinds(*arguments):
    code, output = run("--format", "json", *arguments)
    found = json.loads(output)
    assert found["healthy"] == (not found["problems"])
    assert code == (0 if found["healthy"] else 1)
    return {(one["kind"], one["group"]) for one in found["problems"]}
