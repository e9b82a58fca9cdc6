"""A process whose handlers misbehave."""

from __future__ import annotations

import threading
import time

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState, QueueMessage
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import Executor, sessions

TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=5, network=10, read=60)


class Survival:
    """What was seen of an odd message and the one behind it, in one partition, on one thread."""

    def __init__(self, act, payloads=("odd", "next"), *, max_attempts=2, then=lambda: None, **options):
        self.starts = []
        self.then = then
        self.threads = set()
        self.act = act
        sub = Sub(handler(function=self, max_attempts=max_attempts, **options))
        publish_many("t", [Message(payload, key="k") for payload in payloads])
        executor = Executor(sub.inbox, USING, threads=1, timeouts=TIMEOUTS)
        executor.start()
        try:
            deadline = time.monotonic() + 60
            while True:
                sub.step()
                sub.flush()
                if all(sub.inbox.is_idle(ref) for ref in sub.handlers) and not lag() and len(self.starts) >= 2:
                    break
                assert time.monotonic() < deadline, ("waited in vain", self.starts)
                time.sleep(0.002)
        finally:
            sub.leave()
            executor.join(30)
        self.executor = executor
        sequence()

    def __call__(self, delivery):
        self.starts.append((delivery.payload, delivery.attempt))
        self.threads.add(threading.get_ident())
        if delivery.payload == "odd":
            return self.act(delivery)
        self.then()
        Effect.objects.create(name=str(delivery.payload))
        return None

    @property
    def dead(self):
        return list(QueueMessage.objects.filter(topic="t_dlq").order_by("offset"))

    def check(self, *, dead):
        """The odd one was acked at once, or failed twice and is a dead letter; the next one was handled."""
        assert self.starts.count(("next", 1)) == 1
        assert len(self.threads) == 1
        assert [one for one in self.starts if one[0] == "next"] == [("next", 1)]
        assert [attempt for payload, attempt in self.starts if payload == "odd"] == ([1, 2] if dead else [1])
        assert [bytes(one.payload) for one in self.dead] == ([b'"odd"'] if dead else [])
        # It is committed: seen from another connection.
        assert Effect.objects.filter(name="next").count() == 1
        assert not DeliveryState.objects.exists()
