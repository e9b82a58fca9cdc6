"""Runs async handlers on threads of an executor."""

from __future__ import annotations

from django_mysqlqueue import publish_many, subscriber
from tests.support.harness import USING, Sub, lag
from tests.support.internals import Executor, GroupRef, registry, sessions

TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=10, network=10, read=60)


def run(function, messages, *, threads=2, **options):
    """Runs a decorated function on real handler threads until everything is settled."""
    subscriber("t", group="g", **options)(function)
    handler = registry.handlers()[GroupRef("g", "t")]
    publish_many("t", messages)
    sub = Sub(handler, threads=threads, concurrency=100)
    executor = Executor(sub.inbox, USING, threads=threads, timeouts=TIMEOUTS, with_loop=handler.is_async)
    executor.start()
    try:
        for _ in range(200):
            sub.step()
            sub.flush()
            if not lag():
                break
            sub.inbox.wait(0.05)
        assert lag() == 0
    finally:
        sub.inbox.close()
        executor.join(10)
    sub.leave()
    return executor
