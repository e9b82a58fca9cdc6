"""Log lines and threads name the database that they are about, if the queue has several."""

from __future__ import annotations

import logging
import re
import threading

import pytest
from django.db import OperationalError

from django_mysqlqueue import publish, subscriber
from django_mysqlqueue.runtime import log
from tests.support.internals import (
    GroupRef,
    Heart,
    Loop,
    Progress,
    about,
    groups,
    heartbeats,
    registering,
    worker_thread,
)
from tests.support.processes import Worker, wait_for

QUEUE = "queue"
SEVERAL = {"TOPICS": {"orders": {"DATABASE": QUEUE}}}


def logged(caplog, name):
    return [one for one in caplog.records if one.mysqlqueue["event"] == name]


def said(using, **fields):
    """Logs an event in a thread of a worker; returns the thread's name."""
    thread = worker_thread(lambda: log.event(logging.WARNING, "test.said", **fields), "test", using)
    thread.start()
    thread.join()
    return thread.name


def test_lines_of_several_databases(settings, caplog):
    settings.MYSQLQUEUE = SEVERAL
    assert said(QUEUE, n=1) == "mysqlqueue-test-queue"
    assert said("default", n=2) == "mysqlqueue-test-default"
    assert said("default", database=QUEUE, n=3) == "mysqlqueue-test-default"
    assert [one.getMessage() for one in caplog.records] == [
        "test.said n=1 database=queue",
        "test.said n=2 database=default",
        "test.said database=queue n=3",
    ]
    assert caplog.records[0].mysqlqueue == {"event": "test.said", "n": 1, "database": QUEUE}


def test_one_database_is_not_named(settings, caplog):
    settings.MYSQLQUEUE = {"DATABASE": QUEUE}
    assert said(QUEUE, n=1) == "mysqlqueue-test"
    assert [one.getMessage() for one in caplog.records] == ["test.said n=1"]


def test_only_lines_of_the_block(settings, caplog):
    settings.MYSQLQUEUE = SEVERAL
    with about(QUEUE):
        with about("default"):
            log.event(logging.WARNING, "test.said")
        log.event(logging.WARNING, "test.said")
    log.event(logging.WARNING, "test.said")
    assert [one.mysqlqueue.get("database") for one in caplog.records] == ["default", QUEUE, None]


def test_heartbeats_that_fail(settings, caplog, monkeypatch):
    settings.MYSQLQUEUE = SEVERAL

    def fail(*arguments):
        raise OperationalError("gone")

    monkeypatch.setattr(heartbeats, "beat", fail)
    heart = Heart(QUEUE, "s", [], interval=0.01, lease=30.0, info={}, progress=Progress())
    heart.start()
    wait_for(lambda: logged(caplog, "heartbeat.failed"))
    assert "mysqlqueue-heartbeat-queue" in {thread.name for thread in threading.enumerate()}
    heart.stop()
    assert logged(caplog, "heartbeat.failed")[0].mysqlqueue["database"] == QUEUE


def test_the_event_loop(settings):
    settings.MYSQLQUEUE = SEVERAL
    loop = Loop(QUEUE)
    loop.start()
    names = {thread.name for thread in threading.enumerate()}
    loop.stop(5)
    assert "mysqlqueue-loop-queue" in names


def test_what_migrate_registers(queue_db, settings, no_handlers, caplog):
    settings.MYSQLQUEUE = SEVERAL
    caplog.set_level(logging.INFO, "django_mysqlqueue")
    subscriber("orders", group="g", filter={"region": ["eu"]})(lambda delivery: None)
    groups.register(QUEUE, GroupRef("g", "orders"), mode="ordered", start="earliest")
    registering.register_groups(QUEUE)
    assert logged(caplog, "filter.registered")[0].mysqlqueue["database"] == QUEUE


@pytest.mark.processes
def test_lines_of_a_process(queue_db, settings, tmp_path):
    topics = {"p.plain": {"DATABASE": QUEUE}}
    settings.MYSQLQUEUE = {"TOPICS": topics}
    publish("p.plain", {"n": 0, "fail": True}, key="k")
    worker = Worker(tmp_path, "--group", "plain", "--drain", TOPICS=topics)
    try:
        assert worker.wait() == 0, worker.output
    finally:
        worker.end()
    assert re.search(r"delivery\.failed .* database=queue$", worker.output, re.MULTILINE)
