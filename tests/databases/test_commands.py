"""Commands where the queue has an alias of its own."""

from __future__ import annotations

import json

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import ConsumerGroup, Operation, PartitionLease, QueueMessage, Reader
from django_mysqlqueue.schedules.definitions import Definition
from django_mysqlqueue.schedules.timetables import Timetable
from tests.support import job_worlds
from tests.support.internals import GroupRef, NewResult, Session, groups, installing, job_rows, schedules
from tests.support.queue_alias import command, on_queue
from tests.support.routers import QueueElsewhere

QUEUE = "queue"


@pytest.fixture(params=["setting", "router", "--database", "--database against a router"])
def named(request, queue, settings):
    """What a command line must say so that it works on the alias ``queue``."""
    if request.param == "setting":
        settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    elif request.param == "router":
        settings.DATABASE_ROUTERS = [QueueElsewhere()]
    elif request.param == "--database against a router":
        settings.DATABASE_ROUTERS = [SendsTheQueueElsewhere()]
    return ("--database", QUEUE) if request.param.startswith("--database") else ()


class SendsTheQueueElsewhere:
    def db_for_read(self, model, **hints):
        return "other"

    db_for_write = db_for_read


OPERATIONS = [
    ("queuepause g t --noinput", "is paused."),
    ("queueresume g t --noinput", "is resumed."),
    ("queueseek g t latest --noinput", "continues with the first message at or after offset"),
    ("queueset g t max_attempts=3 --noinput", "max_attempts is 3 now"),
    ("queueretry g t --dry-run", "are waiting for another attempt"),
    ("queueretry g t --at 2100-01-01T00:00 --error none --dry-run", "with an error that contains “none” are waiting"),
    ("queuereplayrange g t 1 1 --dry-run", "at the offsets 1 to 1"),
    ("queueredrive t --dry-run", "No dead letter"),
    ("queuediscard t --reason x --dry-run", "No dead letter"),
    ("queuescheduled t later --at 2100-01-01T00:00 --noinput", "Messages rescheduled to 2100-01-01"),
    ("queuecancel t later --noinput", "Scheduled messages cancelled: 1."),
    ("queuecancel jobs.default job --noinput", "Jobs cancelled: 1."),
    ("queuescheduled", "No messages are scheduled"),
    ("queuetail t", '"topic":"t"'),
    ("queuerecurring --run-now s --noinput", "A message is published: recurring:s:"),
    ("queuerecurring --pause s --noinput", "The schedule s is paused."),
    ("queuerecurring --resume s --noinput", "The schedule s is resumed."),
    ("queuerecurring", "every 1 d"),
    ("queueoperations --action pause", "Pause group"),
    ("queuequarantine", "The quarantine is empty."),
    ("queuedropreader lake --noinput", "The reader lake is dropped."),
    ("queuerelease g t k --dry-run", "leases will be released: 1."),
]
"""A command line, and what it says."""


def test_every_command_works_where_the_queue_is(named, settings):
    publish("t", 1, using=QUEUE)
    publish("t", 2, id="later", delay=1000, using=QUEUE)
    groups.register(QUEUE, GroupRef("g", "t"), mode="ordered", start="earliest")
    assert "Moved 1 message." in command("queuesequence", *named)
    status = json.loads(command("queuestatus", "--format", "json", *named))
    assert (status["database"], status["groups"][0]["lag"]) == (QUEUE, 1)
    assert "Healthy: 1 group, backlog 1, outbox 0." in command("queuehealth", *named)
    assert "Would delete 0 messages." in command("queuegc", "--dry-run", *named)
    assert "Deleted 0 messages" in command("queuegc", *named)
    schedules.register(QUEUE, {"s": Definition(Timetable(every_ms=86_400_000), "t", 1)})
    PartitionLease.objects.using(QUEUE).create(consumer_group="g", topic="t", partition_key="k", leased_by="s:1")
    job_rows.insert(Session(QUEUE), [NewResult("job", "default", "default", "tests.app.jobs.add", "{}", 0, 0, 1)])
    settings.TASKS = job_worlds.TASKS
    Reader.objects.using(QUEUE).create(name="lake", read_offset=0)
    for line, said in OPERATIONS:
        assert said in command(*line.split(), *named), line
    assert on_queue(Operation) == len([line for line, _ in OPERATIONS if "--noinput" in line])
    assert "is now shared" in command("queuegroupmode", "g", "t", "shared", "--noinput", *named)
    assert groups.find(QUEUE, GroupRef("g", "t")).mode == "shared"
    assert "is dropped." in command("queuedropgroup", "g", "t", "--noinput", *named)
    assert on_queue(ConsumerGroup) == 0
    assert on_queue(QueueMessage) == 1


@pytest.mark.servers_only
def test_procedures_are_installed_where_the_queue_is(named):
    assert "Installed " in command("queueprocedures", *named)
    assert installing.state(QUEUE).is_current
    assert "Removed " in command("queueprocedures", "--remove", *named)
    assert not installing.state(QUEUE).is_installed


def test_no_command_is_left_out():
    """A new one has to be in the test above, or say here why it need not be."""
    from django.core.management import get_commands

    mine = {name for name, app in get_commands().items() if app == "django_mysqlqueue"}
    here = {"queuesequence", "queuestatus", "queuehealth", "queuegc", "queuegroupmode", "queuedropgroup"}
    here |= {"queuedeadletter", "queueprocedures"}
    # tests/sql/test_grants.py: it only prints.
    here |= {"queuegrants"}
    # test_moving.py: --database has another meaning.
    here |= {"queuemove"}
    # tests/pipeline: they read and write by connections of their own, made from the alias.
    spark = {"queuearchive", "queuereplay", "queuereport"}
    # tests/operations/test_erase.py, tests/pipeline/test_erase.py: it goes to the database of its topic as others do.
    here |= {"queueerase"}
    assert mine == here | {"runsubscriber"} | spark | {line.split()[0] for line, _ in OPERATIONS}
