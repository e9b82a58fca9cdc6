"""The plan of the jobs: their queues, and which of them fail.

Recurring jobs have no producer: a schedule of ``schedule_plan`` enqueues them. Their tasks are in ``WITHOUT_PRODUCER``,
so that the checks do not look for them in the ledger.
"""

from __future__ import annotations

import zlib

from soak import plan

QUEUES = ("default", "bulk")
BULK_TOPIC = "jobs.bulk"
TOPICS = tuple(f"jobs.{name}" for name in QUEUES)
GROUP = "jobs"
SOUGHT = BULK_TOPIC
"""The topic on which the group is sent back to the beginning of the log."""
MAX_ATTEMPTS = 4
"""Number of failed attempts after which a job has failed. After errors of the database it is ``plan.MAX_ATTEMPTS``."""

ATOMIC, PATIENT, UNIQUE = "atomic", "patient", "unique"
PLAIN, ASYNC = "plain", "asynchronous"
KINDS = (*[ATOMIC] * 5, *[PLAIN] * 4, *[ASYNC] * 2, PATIENT)
"""The names of the tasks, as often as they are enqueued. Unique jobs are enqueued in addition."""
IN_CHAINS = (*[ATOMIC] * 4, *[PLAIN] * 2)
IN_SOUGHT = frozenset({PLAIN, ASYNC})
"""The tasks on that topic. Their jobs may have two messages, if they were redriven."""
ON_TIME, SLOWLY_ON_TIME = "on_time", "slowly_on_time"
"""The tasks of schedules."""
WITHOUT_PRODUCER = frozenset({ON_TIME, SLOWLY_ON_TIME})
"""Names of tasks whose jobs no producer enqueues."""
ATOMIC_KINDS = frozenset({ATOMIC, PATIENT, UNIQUE, ON_TIME})
"""The tasks whose writes commit with their results."""

POISON, REFUSED, MENDED, FLAKY, FINE = "poison", "refused", "mended", "flaky", plan.FINE
ASKING, WAITING, CONTINUING = "asking", "waiting", "continuing"
_SHARES = (
    *((0.02, POISON), (0.04, REFUSED), (0.08, MENDED), (0.18, FLAKY)),
    *((0.20, ASKING), (0.22, WAITING), (0.24, CONTINUING)),
)
WAIT, LONG_WAIT = 1.0, 61.0
"""Delays of jobs that ask for another call, in seconds: the longer one moves the message."""
WAITS_FOR = 3.0
"""Seconds since its enqueueing for which a job that waits asks for another call."""
PATIENCE = 2.0
"""Seconds that a patient job lasts, if it is not asked to stop."""
WINDOW = 2.0
"""Seconds for which all producers enqueue the same unique jobs."""


def fate(kind: str, token: str) -> str:
    """Return what a task does. It depends on the token, so that the checker knows it.

    ``POISON`` always raises, ``REFUSED`` raises what is not retried, ``MENDED`` raises until its attempts are used up,
    and returns after its dead letter was redriven, and ``FLAKY`` raises once. Unique jobs are flaky or fine.

    ``ASKING`` asks for another attempt once, ``WAITING`` for calls that do not count until ``WAITS_FOR`` is over, and
    ``CONTINUING``, if it is atomic, once for a call that keeps what it has written.

    Args:
        kind: the name of the task.
        token: the token of the job; of a unique one, its argument.
    """
    place = zlib.crc32(f"{kind}:{token}".encode()) / 2**32
    found = next((name for share, name in _SHARES if place < share), FINE)
    if kind == UNIQUE and found != FINE:
        return FLAKY
    # What is not atomic does not know that it continues.
    return FINE if found == CONTINUING and kind not in (ATOMIC, PATIENT) else found


def wait(token: str) -> float:
    """Return for how long a job with a token waits at a time."""
    return LONG_WAIT if zlib.crc32(f"wait:{token}".encode()) % 4 == 0 else WAIT


def is_slow(token: str) -> bool:
    """Return whether a task takes long, so that others can interfere."""
    return plan.is_slow("jobs", token)
