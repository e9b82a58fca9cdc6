"""The database that a command works on."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_mysqlqueue.models import ConsumerGroup, QuarantinedMessage
from tests.support.commands import run
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import USING
from tests.support.internals import GroupRef, groups

COMMANDS = [
    ("queuestatus",),
    ("queueoperations",),
    ("queuesequence",),
    ("queuegc",),
    ("queuegc", "--dry-run"),
    ("queuedropgroup", "g", "t", "--noinput"),
    ("queuegroupmode", "g", "t", "shared", "--noinput"),
    ("runsubscriber",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unknown_database_is_refused(db, command):
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    with pytest.raises(CommandError, match="'nowhere'"):
        run(*command, "--database", "nowhere")
    assert ConsumerGroup.objects.get().mode == "ordered"


@pytest.mark.parametrize("command", COMMANDS[:-1], ids=" ".join)
def test_the_setting_names_the_database(db, settings, command):
    """Read on each run; the router is not asked."""
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    settings.MYSQLQUEUE = {"DATABASE": USING}
    settings.DATABASE_ROUTERS = [Nowhere()]
    run(*command)


@pytest.mark.parametrize("change", ["--requeue", "--delete"])
def test_rows_of_the_quarantine_are_those_of_a_database(queue_db, settings, change):
    """Each database has its own numbers: a command that names none changes nothing."""
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"DATABASE": "queue"}}}
    row = str(QuarantinedMessageFactory().pk)
    with pytest.raises(CommandError, match="--requeue and --delete require --database"):
        run("queuequarantine", change, row, "--noinput")
    assert QuarantinedMessage.objects.exists()
    run("queuequarantine", change, row, "--noinput", "--database", USING)
    assert not QuarantinedMessage.objects.exists()


class Nowhere:
    def db_for_write(self, model, **hints):
        return "nowhere"
