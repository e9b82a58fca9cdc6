"""Handler threads."""

from __future__ import annotations

from django_mysqlqueue import publish
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Action, Batch, executor


def test_a_handler_thread_outlives_whatever_happens(db, monkeypatch):
    publish("t", 1)
    sub = Sub(handler())
    sub.step()
    held = sub.take()

    def explode(*args, **options):
        raise SystemExit

    monkeypatch.setattr(executor, "handle", explode)
    (outcome,) = executor.Executor(sub.inbox, USING, threads=0, timeouts=None)._safely(Batch([], [held]))
    assert outcome.action is Action.NACK
    assert outcome.delivery is held.claimed
