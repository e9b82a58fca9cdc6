"""A subscriber that tests drive by hand: same poller, same inbox, no threads, no sleeping."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from django.db import connections, transaction

from django_mysqlqueue.inspection.problem import Problem
from django_mysqlqueue.management.commands import queuestatus
from django_mysqlqueue.options.backoff import Backoff
from tests.support import oracle
from tests.support.internals import (
    EVERYTHING,
    LIMITS,
    Batch,
    Context,
    Delivery,
    GroupRef,
    Handler,
    Held,
    Inbox,
    LogPlace,
    Poller,
    PollingLimits,
    Progress,
    Session,
    Subset,
    Unstarted,
    call,
    get_settings,
    groups,
    heartbeats,
    log_places,
    registrable,
    releasing,
    sequencing,
)

USING = "default"
_numbers = itertools.count(1)


def handler(
    topic: str = "t", group: str = "g", function: Callable[[Delivery], Any] | None = None, **options: Any
) -> Handler:
    """A handler with test defaults: no backoff, five attempts."""
    defaults: dict[str, Any] = {
        "mode": "ordered",
        "atomic": False,
        "start": "earliest",
        "on_failure": "skip",
        "max_attempts": 5,
        "visibility_timeout": 60.0,
        "max_processing_time": 600.0,
        "backoff": Backoff(initial=0, jitter=0),
    }
    return Handler(
        ref=GroupRef(group, topic),
        function=function or (lambda delivery: None),
        where="tests",
        **{**defaults, **options},
    )


class Going(Progress):
    """Of a poller that gets on all the time."""

    @property
    def at(self) -> float:  # type: ignore[override]
        return time.monotonic()

    @at.setter
    def at(self, moment: float) -> None:
        """It is what it is."""


class ManualHeart:
    """Beats when it is told to; its leases are good until the test says otherwise."""

    def __init__(self, sub: Sub) -> None:
        self._sub = sub
        self.is_good = True
        self.in_doubt = False
        self.beat_at = time.monotonic()

    def good(self) -> bool:
        return self.is_good and not self.in_doubt

    def must_verify(self) -> bool:
        return self.in_doubt

    def verified(self, at: float) -> None:
        self.in_doubt = False

    def beat(self) -> None:
        info = {"host": "tests", "subset": self._sub.subset.as_json(), "threads": 1}
        heartbeats.beat(self._sub.using, self._sub.name, list(self._sub.handlers), info)
        self.beat_at = time.monotonic()


class Sub:
    """One subscriber. ``step`` is a poll, a tick and a claim; ``work`` runs what was claimed."""

    def __init__(
        self,
        *handlers: Handler,
        name: str = "s",
        claim_size: int = 100,
        prefetch: int = 200,
        subset: Subset = EVERYTHING,
        threads: int = 1,
        concurrency: int = 0,
        using: str = USING,
        limits: PollingLimits = LIMITS,
        unstarted: Unstarted | None = None,
        **settings: Any,
    ) -> None:
        self.using = using
        self.name = f"{name}:{next(_numbers)}"
        self.handlers = {one.ref: one for one in handlers}
        self.settings = dataclasses.replace(get_settings(), prefetch=prefetch, **settings)
        for one in handlers:
            groups.register(using, one.ref, mode=one.mode, start=one.start, options=registrable(one))
        self.subset = subset
        self.progress = Progress()
        self.heart = self._make_heart()
        self.inbox = Inbox(
            self.handlers,
            leases_good=self.heart.good,
            threads=threads,
            concurrency=concurrency,
            unstarted=unstarted,
        )
        self.context = Context(
            using,
            self.name,
            self.settings,
            self.inbox,
            self.heart,
            groups=len(self.handlers),
            claim_size=claim_size,
            subset=subset,
            threads=threads,
            progress=self.progress,
            limits=limits,
        )
        self.poller = Poller(self.context, self.handlers)
        self._batches: dict[int, Batch] = {}
        self.beat()
        # Maintenance has tests of its own; here only the scan at the start runs.
        self.poller.maintenance.next_at = float("inf")

    def _make_heart(self) -> Any:
        return ManualHeart(self)

    def beat(self) -> None:
        self.heart.beat()

    def use(self, alias: str) -> None:
        """Goes on on another alias of the same database."""
        self.using = alias
        object.__setattr__(self.context, "using", alias)

    def step(self, *, tick: bool = True, times: int = 1) -> Sub:
        for _ in range(times):
            self.poller.poll_soon()
            if tick:
                self.poller._next_tick = 0.0
            self.poller.step()
            for _ in range(3):
                if any(work.wants_turn() for work in self.poller.groups):
                    self.poller.step()
            while self.poller.maintenance.is_scanning():
                self.poller.maintenance.next_at = 0.0
                self.poller.step()
            self.poller.maintenance.next_at = float("inf")
        return self

    def take(self) -> Held | None:
        """Starts the next delivery (of a batch handler: the next batch, whose first it returns) without running it."""
        batch = self.inbox.take(None, wait=False)
        if batch is None:
            return None
        self._batches[id(batch.items[0])] = batch
        return batch.items[0]

    def run(self, held: Held) -> int:
        """Runs the handler of what was started with ``held`` and records the outcomes; returns how many."""
        batch = self._batches.pop(id(held))
        self.inbox.finish(batch, call.handle(batch.items, self.using))
        self.inbox.leave(batch)
        return len(batch.items)

    def work(self, limit: int | None = None) -> int:
        """Runs waiting deliveries until ``limit`` or more have run; returns how many."""
        count = 0
        while limit is None or count < limit:
            held = self.take()
            if held is None:
                break
            count += self.run(held)
        return count

    def flush(self) -> None:
        for work in self.poller.groups:
            work.flush_now()

    def settle(self, *, rounds: int = 50) -> int:
        """Steps and works until nothing comes any more; returns how many deliveries ran."""
        total = quiet = 0
        for _ in range(rounds):
            self.step()
            done = self.work()
            total += done
            self.flush()
            quiet = 0 if done else quiet + 1
            if quiet == 2:
                break
        return total

    def owned(self) -> set[str]:
        return {key for work in self.poller.ordered for key in work.mode.owned()}

    def leave(self) -> None:
        """Leaves as on SIGTERM."""
        self.inbox.close()
        self.flush()
        for work in self.poller.ordered:
            keys = [key for key, one in work.mode.partitions.items() if one.owned and not one.in_flight]
            if keys:
                work.mode.release(keys)
        heartbeats.deregister(self.using, self.name, list(self.handlers))

    def cut_off(self) -> None:
        """Leaves as a process that ends by itself while handlers run."""
        self.inbox.close()
        self.flush()
        self.poller.release_leases()
        self.poller.cut_off(60)
        shared = [ref for ref, one in self.handlers.items() if one.shared]
        releasing.release_all(self.using, self.name, self.handlers, shared=shared)


def take_all(sub: Sub) -> list[Held]:
    """Starts everything that may start, without running it."""
    sub.step()
    return list(iter(sub.take, None))


def expire(sub: Sub) -> None:
    """Lets the messages that wait in a process expire now, as its monotonic clock has it."""
    for group in sub.inbox._groups.values():
        for lane in group.lanes.values():
            for held in lane.waiting:
                if held.body.expires_at is not None:
                    held.expires = time.monotonic()


def sequence() -> None:
    """Moves everything that is due into the log, though a subscriber of another process may be at it."""
    deadline = time.monotonic() + 30
    while (sequenced := sequencing.sequence(USING)).moved or sequenced.more or sequenced.busy:
        assert time.monotonic() < deadline, "the outbox does not become empty"


def first_place(using: str = USING) -> LogPlace:
    """The place of the oldest message in the log."""
    return log_places.walk(Session(using), 0, 1, newer=True)[0]


def lag(group: str = "g", topic: str = "t") -> int:
    return oracle.unsettled(Session(USING), GroupRef(group, topic))[0]


@contextlib.contextmanager
def holding(work: Callable[[], Any], using: str = USING) -> Iterator[threading.Event]:
    """A transaction of another connection has done something. It commits when the block ends, or the event is set."""
    has, end = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic(using):
                work()
                has.set()
                end.wait(60)
        finally:
            connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(30)
    try:
        yield end
    finally:
        end.set()
        thread.join(30)


def in_thread(function: Callable[[], Any]) -> Any:
    """Runs a function on a thread, and so on a connection, of its own; re-raises what it raises."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread hangs"
    if failure:
        raise failure[0]
    return result[0]


def problems_found() -> list[Problem]:
    """What is wrong with the queue, worst first."""
    return list(queuestatus.read_status(USING).problems)


def payloads(deliveries: Iterable[Delivery]) -> list[Any]:
    return [delivery.payload for delivery in deliveries]
