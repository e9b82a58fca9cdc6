"""Histories of a queue: what happened at which minute, and what is said of it after each.

A ``History`` plays a script: by minute, what is done. All of it goes through the tables: handlers run, subscribers
write their counts and heartbeats, operators pause and redrive. The database's clock moves from minute to minute. After
each one, everybody who is asked must say the same, and a test compares what they say with what it expects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.admin.shared import shared
from django_mysqlqueue.admin.status import read_shared
from django_mysqlqueue.inspection import PAGES, find_problems, get_overview
from django_mysqlqueue.inspection.bounds import STALL_TIMES
from django_mysqlqueue.inspection.causes import Cause, QueueStatus
from django_mysqlqueue.management import watching
from django_mysqlqueue.management.commands import queuestatus
from django_mysqlqueue.models import Operation
from django_mysqlqueue.operations import pausing, redriving
from django_mysqlqueue.options.backoff import Backoff
from tests.conftest import Clock
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.health import run as queuehealth
from tests.support.internals import DeadLetterFilter, GroupRef, Session, groups, rollups, samples

MINUTE_MS = 60_000
INTO = 5_000
"""Milliseconds into each minute at which it happens."""
LATER = 10
"""Seconds after which everybody is asked."""
OK, DEGRADED, STOPPED = "ok", "degraded", "stopped"


@dataclasses.dataclass(frozen=True)
class Said:
    """What is said after a minute."""

    state: str
    headline: str = ""
    """The kind of the cause in the headline; empty: nothing is wrong."""
    causes: tuple[str, ...] = ()
    """The causes in their order: severity, kind, groups and the minute in which it began, such as ``0 failing g 5``."""
    healthy: bool = True
    """Whether ``queuehealth`` exits with 0."""


class History:
    """A queue to which things happen minute by minute."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.subs: list[Sub] = []
        self.minute = -1
        """The current minute."""
        self.fails: Callable[[Any], bool] = lambda delivery: False
        """Whether an attempt fails."""
        self._next()
        self.began = self._now() // MINUTE_MS * MINUTE_MS
        self.minute = 0

    # -- what happens ------------------------------------------------------------

    def start(self, *names: str, mode: str = "shared", wait: float = 20.0, **options: Any) -> Sub:
        """Start a subscriber of some groups, each on the topic of its name."""
        defaults: dict[str, Any] = {"max_attempts": None, "backoff": Backoff(initial=wait, factor=1, jitter=0)}
        handlers = [handler(name, name, self._handle, mode=mode, **{**defaults, **options}) for name in names or ("g",)]
        sub = Sub(*handlers)
        self.subs.append(sub)
        return sub

    def stop(self, sub: Sub, *, killed: bool = False) -> None:
        """Stop a subscriber; if it is killed, it says nothing."""
        self.subs.remove(sub)
        if not killed:
            sub.leave()

    def register(self, name: str = "g") -> None:
        groups.register(USING, GroupRef(name, name), mode="shared", start="earliest")

    def publish(self, number: int, name: str = "g", *, key: str | None = None) -> None:
        """Publish messages, with one key or without."""
        publish_many(name, [Message(n, key=key) for n in range(number)])
        sequence()

    def count(self, name: str = "g", *, acked: int = 0, failed: int = 0, dead_lettered: int = 0) -> None:
        """Count attempts as subscribers do every few seconds. Their messages have left no other trace."""
        tally = rollups.Tally(failed=failed, dead_lettered=dead_lettered)
        for _ in range(acked):
            tally.acked(1)
        rollups.add(USING, {GroupRef(name, name): tally})

    def work(self) -> None:
        """All subscribers do what there is to do."""
        for sub in self.subs:
            sub.settle()
            sub.poller.write_rollups()
        sequence()

    def pass_seconds(self, seconds: float) -> None:
        """Let time pass within the minute."""
        self.clock.advance(seconds)
        for sub in self.subs:
            sub.heart.beat()

    def pause(self, name: str = "g") -> None:
        pausing.set_paused(USING, GroupRef(name, name), actor="ada", paused=True)
        # The column's default is the time of the server, not of the clock that the test moves.
        Operation.objects.filter(action="pause", consumer_group=name).update(started_at=self._now())

    def resume(self, name: str = "g") -> None:
        pausing.set_paused(USING, GroupRef(name, name), actor="ada", paused=False)

    def redrive(self, name: str = "g", limit: int | None = None) -> None:
        redriving.redrive_all(USING, DeadLetterFilter(f"{name}_dlq"), actor="ada", limit=limit)
        sequence()

    # -- what is said ------------------------------------------------------------

    def play(
        self, minutes: int, script: Mapping[int, Callable[[], object]], *, always: Callable[[], object] | None = None
    ) -> dict[int, Said]:
        """Let minutes pass, and return what is said, by the first minute in which it is said.

        Args:
            minutes: number of minutes.
            script: what happens in which of them.
            always: what happens in each of them, afterwards.
        """
        found: dict[int, Said] = {}
        last = None
        for _ in range(minutes):
            if self.minute in script:
                script[self.minute]()
            if always is not None:
                always()
            self._sample()
            self.pass_seconds(LATER)
            said = self.ask()
            if said != last:
                found[self.minute] = last = said
            self._next()
        return found

    def ask(self) -> Said:
        """Ask everybody, and return what they say."""
        self.clock.stand_still(self._now())  # They ask at the same time.
        try:
            return self._ask()
        finally:
            self.clock.step(0)

    def _ask(self) -> Said:
        shared.clear()
        found = queuestatus.read_status(USING)
        seen = watching.read_snapshot(USING)
        for other in (seen.status, read_shared(USING, PAGES, STALL_TIMES).status):
            assert dataclasses.replace(other, cause=None) == dataclasses.replace(found.summary, cause=None)
        assert [one.text for one in seen.causes] == [one.text for one in found.causes]
        assert list(found.problems) == find_problems(get_overview(using=USING))
        self._check(found.summary, found.causes)
        status, output = queuehealth()
        assert status == int(any(one.severity == 0 or one.kind == "groupless" for one in found.problems))
        assert ("Healthy" in output) == (status == 0)
        cause = found.summary.cause
        return Said(
            found.summary.state, cause.kind if cause else "", tuple(map(self._name, found.causes)), healthy=status == 0
        )

    @staticmethod
    def _check(said: QueueStatus, causes: list[Cause] | Any) -> None:
        """Whatever happens, the headline is that of a cause of the state, and nothing is denied that is listed."""
        assert ("No problems found" in said.text) == (not causes)
        if said.state != OK:
            assert said.cause in causes
            assert said.cause is not None
            assert said.text == said.cause.text
            assert said.cause.severity < 2
        assert [one.severity for one in causes] == sorted(one.severity for one in causes)

    def _name(self, cause: Cause) -> str:
        since = "-" if cause.since is None else str((cause.since - self.began) // MINUTE_MS)
        return " ".join((str(cause.severity), cause.kind, ",".join(ref.group for ref in cause.refs) or "-", since))

    # -- time ----------------------------------------------------------------------

    @staticmethod
    def _now() -> int:
        return Session(USING).now()

    def _sample(self) -> None:
        """Claim the samples of the minute, which adds a row of counts for each group that has a subscriber."""
        samples.claim(USING, sorted({ref for sub in self.subs for ref in sub.handlers}), {})

    def _next(self) -> None:
        now = self._now()
        self.pass_seconds(((now // MINUTE_MS + 1) * MINUTE_MS + INTO - now) / 1000)
        self.minute += 1

    def _handle(self, delivery: Any) -> None:
        if self.fails(delivery):
            raise ConnectionError(f"{delivery.topic} does not answer")
