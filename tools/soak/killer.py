"""Disturb the processes and the server as planned."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import servers
from django.db import Error, connections

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import QueueError
from django_mysqlqueue.models import PartitionLease, QueueMessage
from django_mysqlqueue.options.topics import dlq_topic
from soak import job_plan, plan, records
from soak.facts import Trouble
from soak.fleet import Fleet, Slot, children_of
from soak.plan import Action, Group

T = TypeVar("T")
AIM_TIMEOUT = 6.0
"""Seconds to wait until a process reaches a trap."""
MISSES = 5
"""How often an action is retried later if it found no process."""
AGAIN = 5
"""Number of processes that are killed one after another."""
OVERRIDDEN = 10.0
"""Seconds for which options are overridden."""
IMPATIENCE = 12.0
"""Seconds for which the server closes idle connections."""
SPACING = 1.0
"""Minimum number of seconds between two actions, even after one that took long."""
PATIENCE = 15.0
"""Maximum number of seconds to wait until most subscribers run again."""


@dataclass(frozen=True, slots=True)
class Event:
    """An action, for the killer's log."""

    at: float
    """Seconds since the beginning of the run."""
    kind: str
    what: str
    hit: bool


class Killer:
    """Perform the planned actions, and undo those that must be undone later."""

    def __init__(self, actions: list[Action], fleet: Fleet, server: servers.Server, folder: Path) -> None:
        self._actions = actions
        self._fleet = fleet
        self._server = server
        self._traps = folder / "traps"
        self._began = time.monotonic()
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._frozen: set[int] = set()
        self._acted_at = 0.0
        self.misses: Counter[str] = Counter()
        self.events: list[Event] = []
        self.troubles: list[Trouble] = []
        self.downtimes: list[tuple[float, float]] = []
        """When the server was away: begin and end, in seconds since the beginning of the run."""

    @property
    def counts(self) -> Counter[str]:
        return Counter(event.kind for event in self.events if event.hit)

    def turn(self) -> None:
        now = time.monotonic()
        for due, undo in [one for one in self._undo if one[0] <= now]:
            self._undo.remove((due, undo))
            undo()
        if self._actions and now - self._began >= self._actions[0].at and self._may_act(now):
            action = self._actions.pop(0)
            at = time.monotonic() - self._began
            what = self._act(action)
            self._acted_at = time.monotonic()
            if what is None and self.misses[action.kind] < MISSES:
                self.misses[action.kind] += 1
                self._actions.insert(2, action)
            self.events.append(Event(round(at, 1), action.kind, what or "found no process", what is not None))

    def _may_act(self, now: float) -> bool:
        """Return whether the next action may happen. On a slow machine, wait until most subscribers run again."""
        since = now - self._acted_at
        return since >= SPACING and (since >= PATIENCE or self._fleet.is_at_work())

    def settle(self) -> None:
        """Undo all actions that are still in effect, and remove all traps."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()
        for trap in self._traps.iterdir():
            trap.unlink(missing_ok=True)

    def _act(self, action: Action) -> str | None:
        """Perform an action. Return what it hit, or None if it found nothing to hit."""
        match action.kind:
            case plan.KILL_SUBSCRIBER | plan.KILL_CHILD | plan.KILL_SUPERVISOR | plan.KILL_PUBLISHER | plan.KILL_CLIENT:
                return self._kill(_choose(self._candidates(action.kind), action), action)
            case plan.FREEZE_SUBSCRIBER | plan.FREEZE_PUBLISHER | plan.FREEZE_CLIENT:
                return self._freeze(_choose(self._candidates(action.kind), action), action)
            case plan.DEPLOY:
                return self._deploy(action)
            case plan.KILL_AGAIN:
                return self._kill_again(action)
            case plan.RELEASE:
                return self._release()
            case plan.CUT:
                return self._cut(action)
            case plan.IMPATIENT:
                return self._make_impatient()
            case plan.OVERRIDE:
                return self._override(action)
            case plan.REDRIVE:
                return self._redrive(action)
            case plan.SEEK:
                return self._seek(action)
            case plan.RESTART | plan.CRASH:
                return self._restart(crash=action.kind == plan.CRASH)
            case _:
                return self._aim(action)

    # -- candidates -----------------------------------------------------------

    def _candidates(self, kind: str) -> list[int]:
        """Return the pids of the processes that an action may hit."""
        subscribers = [slot for slot in self._fleet.subscribers if not slot.is_spared]
        supervisors = _pids(slot for slot in subscribers if "--processes" in slot.command)
        match kind:
            case plan.KILL_SUBSCRIBER:
                return _pids(slot for slot in subscribers if "--processes" not in slot.command)
            case plan.KILL_SUPERVISOR:
                return supervisors
            case plan.KILL_CHILD:
                return [pid for one in supervisors for pid in children_of(one)]
            case plan.FREEZE_SUBSCRIBER:
                return self._fleet.workers(spared=True)
            case plan.KILL_CLIENT | plan.FREEZE_CLIENT:
                return _pids(self._fleet.clients)
            case _:
                return _pids(slot for slot in self._fleet.publishers if not slot.is_spared)

    # -- processes ------------------------------------------------------------

    def _kill(self, pid: int | None, action: Action) -> str | None:
        if pid is None:
            return None
        children = children_of(pid)  # they shut down without their supervisor
        since = records.now()
        try:
            self._fleet.kill(pid)
        except ProcessLookupError:
            return None
        for one in (pid, *children):
            self._note(action.kind, since, one)
        return f"process {pid}"

    def _deploy(self, action: Action) -> str | None:
        """Restart a subscriber, whose handlers may take longer than it waits."""
        slots = [slot for slot in self._fleet.subscribers if slot.pid is not None and not slot.is_spared]
        if not slots:
            return None
        slot = slots[int(action.draw * len(slots))]
        since = records.now()
        ending = self._fleet.terminate(slot)
        for one in ending:
            self._note(action.kind, since, one)
        return f"process {ending[0]}"

    def _kill_again(self, action: Action) -> str | None:
        """Kill those that take over the messages of killed processes, too: one process per second."""
        candidates = functools.partial(self._candidates, plan.KILL_SUBSCRIBER)

        def kill() -> None:
            self._kill(_choose(candidates(), action), action)

        now = time.monotonic()
        self._undo += [(now + seconds, kill) for seconds in range(1, AGAIN)]
        return self._kill(_choose(candidates(), action), action)

    def _release(self) -> str | None:
        """Release all partitions of a group of which many wait for their rate."""
        group = next(group for group in plan.GROUPS if group.name == plan.LIMITED)
        leases = PartitionLease.objects.filter(consumer_group=group.name, topic=group.topic).exclude(leased_by="")
        keys = _until_it_works(lambda: list(leases.values_list("partition_key", flat=True)))
        if not keys:
            return None
        since = records.now()
        # A lease may be gone by then.
        with contextlib.suppress(QueueError):
            operations.release(group.name, group.topic, keys, actor="soak")
        self.troubles.append(Trouble(plan.RELEASE, since, records.now(), group=group.name))
        return f"{len(keys)} partitions"

    def _freeze(self, pid: int | None, action: Action) -> str | None:
        """Freeze a process for longer than its lease, and resume it later."""
        if pid is None or pid in self._frozen:
            return None
        seconds = plan.LEASE + 1 + 4 * action.draw
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return None
        self._frozen.add(pid)
        since = records.now()

        def thaw() -> None:
            self._thaw(pid)
            self._note(action.kind, since, pid)

        self._undo.append((time.monotonic() + seconds, thaw))
        return f"process {pid} for {seconds:.1f} s"

    def _thaw(self, pid: int) -> None:
        self._frozen.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _note(self, kind: str, since: float, pid: int = 0) -> None:
        """Record a disturbance that began at ``since`` and ends now."""
        self.troubles.append(Trouble(kind, since, records.now(), pid))

    def _aim(self, action: Action) -> str | None:
        """Arm a trap, and kill or freeze the process that reaches it."""
        name = plan.TRAPS[action.kind]
        armed = self._traps / name
        armed.touch()
        until = time.monotonic() + AIM_TIMEOUT
        caught: Path | None = None
        while caught is None and time.monotonic() < until:
            time.sleep(0.002)
            caught = next(self._traps.glob(f"{name}.*"), None)
        armed.unlink(missing_ok=True)
        # A process may have reached the trap at the last moment.
        caught = caught or next(self._traps.glob(f"{name}.*"), None)
        if caught is None:
            return None
        pid = int(caught.suffix[1:])
        spared = {slot.pid for slot in self._fleet.subscribers if slot.is_spared}
        try:
            if not action.kind.startswith("SIGKILL"):
                return self._freeze(pid, action)
            # Spare the process whose memory is measured.
            return None if pid in spared else self._kill(pid, action)
        finally:
            caught.unlink(missing_ok=True)

    # -- the server -----------------------------------------------------------

    def _cut(self, action: Action) -> str | None:
        # MySQL's other table of this name cannot be read while a statement with an emoji runs.
        schema = "performance" if self._server.engine == "mysql" else "information"
        rows = self._server.execute(
            f"SELECT id FROM {schema}_schema.processlist WHERE id <> CONNECTION_ID() AND db IS NOT NULL ORDER BY id"
        ).split()[1:]
        if not rows:
            return None
        since = records.now()
        start = int(action.draw * len(rows))
        victims = [(rows + rows)[start + step * 7 % len(rows)] for step in range(min(plan.CONNECTIONS, len(rows)))]
        for identity in dict.fromkeys(victims):
            with contextlib.suppress(RuntimeError):  # the connection may have ended already
                self._server.execute(f"KILL CONNECTION {identity}")
        self._note(action.kind, since)
        return f"{len(set(victims))} of {len(rows)} connections"

    def _make_impatient(self) -> str:
        since = records.now()

        def make_patient() -> None:
            self._server.execute("SET GLOBAL wait_timeout = 28800")
            self._note(plan.IMPATIENT, since)

        self._server.execute("SET GLOBAL wait_timeout = 2")
        self._undo.append((time.monotonic() + IMPATIENCE, make_patient))
        return f"for {IMPATIENCE:g} s"

    def _override(self, action: Action) -> str:
        """Make every group claim and prefetch little, and limit it, for a while, as an operator does.

        The filters that are set meanwhile match the same messages as the registered ones, except where a group gets
        some regions only sometimes.
        """
        since = records.now()
        values: dict[str, Any] = {
            "claim_size": 1 + int(action.draw * 10),
            "prefetch": 1 + int(action.draw * 20),
            "poll_interval": 0.05,
        }
        limits = {"rate": "2000/s", "rate_per_key": "500/s", "max_in_flight": 8, "max_in_flight_per_key": 3}

        def values_of(group: Group) -> dict[str, Any]:
            if group in plan.SQL_GROUPS:  # the procedures refuse groups with limits
                return values
            found = {"filter": {"region": [*group.regions, "nowhere"]}} if group.regions else {}
            return values | limits | found

        def restore() -> None:
            self._operate(
                lambda group: operations.settings(group.name, group.topic, unset=list(values_of(group)), actor="soak")
            )
            self._note(plan.OVERRIDE, since)

        self._operate(lambda group: operations.settings(group.name, group.topic, values_of(group), actor="soak"))
        self._undo.append((time.monotonic() + OVERRIDDEN, restore))
        return f"claims of {values['claim_size']} for {OVERRIDDEN:g} s"

    def _redrive(self, action: Action) -> str | None:
        since = records.now()
        found = 0
        for topic in job_plan.TOPICS:
            if _until_it_works(QueueMessage.objects.filter(topic=dlq_topic(topic)).exists):
                found += _until_it_works(functools.partial(operations.redrive, topic, actor="soak")).changed
        self._note(action.kind, since)
        return f"{found} dead letters" if found else None

    def _seek(self, action: Action) -> str:
        """Replay a queue. Its jobs that have ended must not run again."""
        since = records.now()
        _until_it_works(lambda: operations.seek(job_plan.GROUP, job_plan.SOUGHT, "earliest", actor="soak"))
        self._note(action.kind, since)
        return f"of {job_plan.SOUGHT}"

    def _operate(self, operation: Callable[[Group], object]) -> None:
        """Run an operation on each group that stays in a database."""
        for group in plan.GROUPS:
            if group not in plan.MOVED_GROUPS:
                _until_it_works(functools.partial(operation, group))

    def _restart(self, *, crash: bool) -> str:
        began = records.now()
        if crash:
            self._server.kill()
        else:
            self._server.stop()
        self._server.start()
        self._note(plan.CRASH if crash else plan.RESTART, began)
        self.downtimes.append((began - self._began, time.monotonic() - self._began))
        return f"away for {time.monotonic() - began:.1f} s"


def _until_it_works(operation: Callable[[], T]) -> T:
    """Run an operation. Connections are cut, so it may have to be run again."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return operation()
        except (Error, QueueError):
            connections.close_all()
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _pids(slots: Iterable[Slot]) -> list[int]:
    return [slot.pid for slot in slots if slot.pid is not None]


def _choose(pids: list[int], action: Action) -> int | None:
    return pids[int(action.draw * len(pids))] if pids else None
