"""Migrations and routers."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, router

from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.models import ConsumerGroup
from tests.conftest import QUEUE_MODELS
from tests.support.queue_alias import command, on_queue
from tests.support.routers import QueueElsewhere, QueueKeptOut

QUEUE = "queue"


def test_groups_are_registered_only_where_the_queue_is(queue, settings):
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    command("migrate", verbosity=0)
    assert not ConsumerGroup.objects.using("default").exists()
    assert on_queue(ConsumerGroup) == 0
    command("migrate", database=QUEUE, verbosity=0)
    assert {"plain", "atomic", "shared"} <= set(
        ConsumerGroup.objects.using(QUEUE).values_list("consumer_group", flat=True)
    )


def tables(using):
    return {name for name in connections[using].introspection.table_names() if name.startswith("queue_")}


@pytest.fixture
def unmigrated(queue):
    """``queue`` and ``default`` without the queue's tables; put back afterwards."""
    for using in (QUEUE, "default"):
        call_command("migrate", "django_mysqlqueue", "zero", database=using, verbosity=0)
        assert tables(using) == set()
    yield
    # What a router kept out has been recorded as applied.
    for using in (QUEUE, "default"):
        with connections[using].cursor() as cursor:
            if not tables(using):
                cursor.execute("DELETE FROM django_migrations WHERE app = 'django_mysqlqueue'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "routers", [])
        for using in (QUEUE, "default"):
            call_command("migrate", "django_mysqlqueue", database=using, verbosity=0)
    for model in QUEUE_MODELS:
        model.objects.using("default").all().delete()


def test_a_router_that_keeps_the_tables_together(unmigrated, settings):
    """``migrate`` on every alias makes them on one, and says so where a command looks elsewhere."""
    settings.DATABASE_ROUTERS = [QueueElsewhere()]
    for using in ("default", QUEUE):
        call_command("migrate", "django_mysqlqueue", database=using, verbosity=0)
    assert tables("default") == set()
    assert len(tables(QUEUE)) == len(QUEUE_MODELS)
    assert checks.check_router() == checks.check_migrating() == []
    assert on_queue(ConsumerGroup) > 0
    command("queuestatus")
    with pytest.raises(CommandError, match=r"'default' does not have the queue's tables.*routers do not allow"):
        command("queuestatus", "--database", "default")


def test_tables_that_a_router_keeps_out_everywhere(unmigrated, settings):
    """``migrate`` goes through, registers nothing, and the check says what is wrong."""
    settings.DATABASE_ROUTERS = [QueueKeptOut()]
    call_command("migrate", "django_mysqlqueue", verbosity=0)
    (warning,) = checks.check_migrating()
    assert warning.id == "django_mysqlqueue.W014"
    assert "queue_outbox" in warning.msg
    with pytest.raises(CommandError, match="routers do not allow"):
        command("runsubscriber", "--drain")


def test_the_setting_against_the_router(settings):
    """The setting names an alias that the router keeps the tables out of."""
    settings.DATABASE_ROUTERS = [QueueElsewhere()]
    assert checks.check_migrating() == []
    settings.MYSQLQUEUE = {"DATABASE": "default"}
    (warning,) = checks.check_migrating()
    assert "'default'" in warning.msg


def test_tables_that_are_missing_on_the_alias(unmigrated):
    with pytest.raises(CommandError, match=r"Run manage\.py migrate --database queue"):
        command("queuestatus", "--database", QUEUE)
