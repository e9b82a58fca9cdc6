"""Subscriber processes of a queue on its own alias."""

from __future__ import annotations

import json
import signal
from collections import Counter

import pytest
from django.db import connection, connections, router

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage
from tests.app.models import Effect
from tests.support import oracle
from tests.support.internals import GroupRef, Session, get_settings
from tests.support.processes import Worker, assert_ordered, effects, wait_for
from tests.support.routers import QueueElsewhere

QUEUE = "queue"
REF = GroupRef("plain", "p.plain")


@pytest.fixture
def start(db, tmp_path):
    workers = []

    def start(*arguments, routers=(), **settings):
        worker = Worker(tmp_path, *arguments, env={"TEST_ROUTERS": json.dumps(routers)}, **settings)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.end()


EVERY_GROUP = ("--group", "plain", "--group", "atomic", "--group", "shared")


@pytest.mark.promise("One database")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {"DATABASE": QUEUE}),
        ((), {"routers": ["tests.support.routers.QueueElsewhere"]}),
        (("--database", QUEUE), {}),
    ],
    ids=["setting", "router", "--database"],
)
def test_a_subscriber_of_a_queue_on_its_own_alias(queue, start, arguments, options):
    """Handlers write to ``default``; nothing of the queue is ever there."""
    publish_many("p.plain", (Message({"n": n}, key=f"k{n % 3}") for n in range(60)), using=QUEUE)
    publish_many("p.shared", (Message({"n": n}) for n in range(20)), using=QUEUE)
    worker = start(*EVERY_GROUP, *arguments, "--drain", **options)
    assert worker.wait() == 0, worker.output
    assert f"database  {QUEUE} (" in worker.output
    for group, count in (("plain", 60), ("atomic", 60), ("shared", 20)):
        assert Counter(number for _, _, number in effects(group)) == Counter(range(count)), group
    assert_ordered(effects("plain"))
    assert oracle.unsettled(Session(QUEUE), REF)[0] == 0
    assert not Effect.objects.using(QUEUE).exists()


@pytest.mark.promise("One database")
@pytest.mark.processes
def test_a_subscriber_never_reads_a_replica(db, start):
    """From its start to its end. The handlers' own reads are theirs to route."""
    publish_many("p.plain", (Message({"n": n}, key=f"k{n % 3}") for n in range(60)))
    publish_many("p.shared", (Message({"n": n}) for n in range(20)))
    publish("p.plain", {"n": 60, "fail": True}, key="k0")
    worker = start(*EVERY_GROUP, routers=["tests.support.routers.ReadsFromReplica"])

    def is_done():
        # The one that failed has run twice in the group that is not atomic.
        return [len(effects(group)) for group in ("plain", "atomic", "shared")] == [62, 61, 20]

    wait_for(is_done, worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output
    assert "replica" not in worker.output
    assert "died" not in worker.output


def test_the_harness_means_what_it_says(settings):
    """These aliases are what the tests above take them for."""
    assert get_settings().database is None
    assert connections[QUEUE].settings_dict["NAME"] != connection.settings_dict["NAME"]
    assert connections[QUEUE].vendor == connection.vendor
    settings.DATABASE_ROUTERS = [QueueElsewhere()]
    assert router.db_for_write(OutboxMessage) == QUEUE
