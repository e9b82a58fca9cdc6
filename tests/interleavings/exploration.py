"""What schedules are explored with: threads, settings, pinned statistics; and what is done with each pair's report."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import shorten
from unittest.mock import patch

from django.db import connections
from django.test import override_settings

from tests.crash.crashes import ALIAS
from tests.interleavings import engine as engines
from tests.interleavings import explore, pictures, reasons
from tests.interleavings.engine import Engine, ToolError
from tests.interleavings.explore import Report, Unserial
from tests.interleavings.known import ARROW, NOBODY, Known, Outcome
from tests.interleavings.trials import Beginning, Pair, Trial
from tests.interleavings.waiting import Waiting
from tests.interleavings.worlds import LEASE_MS
from tests.support import job_worlds, refusing
from tests.support.harness import USING
from tests.support.internals import installing, publishing
from tests.support.statistics import Size, pinned

SETTINGS = {
    "RETENTION": 0,
    "ORPHAN_RETENTION": 0,
    "RECORD_DELIVERIES": "all",
    "LEASE_DURATION": LEASE_MS / 1000,
    "HISTORY_RETENTION": 30 * LEASE_MS / 1000,
}
THREADS = "ABC"


@dataclass
class Exploration:
    """Threads on a server."""

    engine: Engine

    def trial(self, pair: Pair, beginning: Beginning | None = None) -> Trial:
        return Trial(pair, self.engine, beginning)

    def renew(self) -> None:
        """Other threads, after an error of the tool."""
        self.engine.close()
        self.engine = Engine(THREADS, Waiting())

    def explore(self, pair: Pair, bound: int, **options: object) -> Report:
        """As ``explore.explore``; once more with new threads if the tool has failed."""
        bound = pair.bound(bound)
        try:
            return explore.explore(self.trial(pair), bound, **options)  # type: ignore[arg-type]
        except ToolError:
            self.renew()
            return explore.explore(self.trial(pair), bound, **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def exploring(statistics: Size = "small") -> Iterator[Exploration]:
    """Everything that schedules need, on a server that nobody else uses.

    Args:
        statistics: what the optimizer is told of the tables: ``"small"`` or ``"large"``.
    """
    connections.settings[ALIAS] = dict(connections[USING].settings_dict)
    log = logging.getLogger("django_mysqlqueue")
    level = log.level
    log.setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        stack.callback(connections.settings.__delitem__, ALIAS)
        stack.callback(log.setLevel, level)
        stack.enter_context(override_settings(MYSQLQUEUE=SETTINGS))
        # Here, so that no operation overrides it in its thread.
        stack.enter_context(job_worlds.configured())
        stack.enter_context(patch.object(time, "sleep", engines.sleep))
        stack.enter_context(patch.object(time, "monotonic", engines.monotonic))
        stack.enter_context(patch.object(publishing, "CHUNK_ROWS", 1))
        stack.enter_context(pinned(connections[USING], statistics))
        installing.install(USING)
        stack.enter_context(refusing.refusing())
        with connections[USING].cursor() as cursor:
            cursor.execute(f"ALTER TABLE queue_messages AUTO_INCREMENT = {pictures.FIRST_OFFSET}")
        waiting = Waiting()
        stack.callback(waiting.close)
        found = Exploration(Engine(THREADS, waiting))
        stack.callback(lambda: found.engine.close())
        yield found


def findings(report: Report, known: Known) -> list[str]:
    """What of a report is wrong or new, one line each, with its schedule."""
    found = [f"{text}  [{schedule}]" for text, schedule in report.broken.items()]
    listed = known.outcomes.get(report.pair, {})
    found += [
        f"an outcome that neither order has ({reasons.of(one) or 'no reason fits'}) {one.digest}  "
        f"[{one.schedule}]; {_unlike(one)}"
        for one in report.unserial
        if one.digest not in listed
    ]
    found += [f"waits: {what}  [{name}]" for what, name in report.waits.items() if what not in known.waits]
    found += [f"deadlock: {what}  [{name}]" for what, name in report.deadlocks.items() if what not in known.deadlocks]
    return found


def _unlike(one: Unserial) -> str:
    return f"unlike {one.nearest}: {'; '.join(one.lines)}"


def learn(report: Report, known: Known) -> list[str]:
    """Adds what a report has to what is known; returns what cannot be learned: it is wrong."""
    unexplained = [f"{text}  [{schedule}]" for text, schedule in report.broken.items()]
    listed = known.outcomes.setdefault(report.pair, {})
    for one in report.unserial:
        if reason := reasons.of(one):
            listed.setdefault(one.digest, Outcome(reason, one.schedule, shorten(_unlike(one), 160, placeholder="…")))
        else:
            unexplained.append(f"no reason fits the outcome {one.digest}  [{one.schedule}]; {_unlike(one)}")
    if not listed:
        del known.outcomes[report.pair]
    for what, name in report.waits.items():
        if what.endswith(ARROW + NOBODY):
            unexplained.append(f"waits: {what}  [{name}]")
        else:
            known.waits.add(what)
    unexplained += [
        f"deadlock: {what}  [{name}]" for what, name in report.deadlocks.items() if what not in known.deadlocks
    ]
    return unexplained
