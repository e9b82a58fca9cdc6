"""Handlers that fork."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest
from django.db import DatabaseError, connection, connections, transaction

from tests.app.models import Effect
from tests.support.survival import Survival


def child_returns():
    return None


def child_raises():
    raise ValueError("in the child")


def child_exits():
    sys.exit(7)


def child_publishes():
    Effect.objects.create(name="child")
    os._exit(5)


def child_unwinds():
    with transaction.atomic():
        Effect.objects.create(name="in the child")
        raise SystemExit("text")


def child_closes():
    connections.close_all()
    os._exit(6)


class Bystander:
    """Another thread, idle, with a connection of its own."""

    def __init__(self):
        self.ready, self.go, self.seen = threading.Event(), threading.Event(), []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        assert self.ready.wait(30)

    def run(self):
        self.ask()
        self.ready.set()
        self.go.wait(100)
        self.ask()
        connections.close_all()

    def ask(self):
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT CONNECTION_ID()")
                self.seen.append(cursor.fetchone())
        except DatabaseError as error:
            self.seen.append(error)

    def end(self):
        self.go.set()
        self.thread.join(30)
        return self.seen


CHILDREN = {child_returns: 0, child_raises: 1, child_exits: 7, child_publishes: 5, child_closes: 6, child_unwinds: 1}


@pytest.mark.servers_only
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_that_a_handler_forks_leaves_its_parents_sessions_alone(db, child, atomic):
    """It ends when it comes back out of the handler; every thread of the parent keeps its connection."""
    mine = connection.connection.thread_id()
    status, sessions_of_the_thread = [], []
    bystander = Bystander()

    def act(delivery):
        Effect.objects.create(name="parent")
        sessions_of_the_thread.append(connection.connection.thread_id())
        pid = os.fork()
        if pid == 0:
            gc.collect()
            return child()
        status.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        Effect.objects.create(name="parent")
        sessions_of_the_thread.append(connection.connection.thread_id())
        return None

    Survival(act, atomic=atomic).check(dead=False)
    before, after = bystander.end()
    assert before == after
    assert status == [CHILDREN[child]]
    assert sessions_of_the_thread[0] == sessions_of_the_thread[1]
    assert connection.connection.thread_id() == mine
    with connection.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID()")
        assert cursor.fetchone() == (mine,)
    assert Effect.objects.filter(name="parent").count() == 2
    assert Effect.objects.filter(name="child").exists() == (child is child_publishes)
