"""The input of the checks of jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak.facts import Trouble
from soak.records import Step, Transaction

OURS = "django_mysqlqueue.tasks.exceptions"
PLANNED, REFUSED = "soak.app.tasks.Planned", "soak.app.tasks.Refused"
CANCELLED, EARLIER, LOST = (f"{OURS}.{name}" for name in ("JobCancelled", "EarlierJobFailed", "WorkerLost"))
ASKED = "django_mysqlqueue.subscriptions.retry_later.RetryLater"
NOT_CALLED = (
    "The job was cancelled before it started.",
    "of an earlier stage of the chain has failed.",
)
"""The ends of the texts of errors that belong to no attempt."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A row of the ledger: a committed call of ``enqueue()``."""

    token: str
    job: str
    """The id that ``enqueue()`` returned: of a unique job, perhaps one that another call has enqueued."""
    kind: str
    of: str = ""
    """The chain, or the argument of a unique job."""
    stage: int = 0

    @property
    def is_later(self) -> bool:
        """Whether it is a job of a chain that has to wait for others."""
        return self.stage > 0


@dataclass(frozen=True, slots=True)
class Result:
    """A row of a result."""

    job: str
    kind: str
    status: str
    errors: Sequence[tuple[str, str]] = ()
    """The class and the text of each."""
    workers: Sequence[str] = ()
    started_at: int = 0
    """By the database's clock, in epoch milliseconds."""
    finished_at: int = 0
    value: Any = None
    stage: str = ""
    enqueued_at: int = 0

    @property
    def last(self) -> str:
        """The class of the last error."""
        return self.errors[-1][0] if self.errors else ""

    @property
    def failures(self) -> list[str]:
        """The classes of what its task has raised."""
        return [path for path, text in self.errors if path != LOST and not text.endswith(NOT_CALLED)]


@dataclass(frozen=True, slots=True)
class Stage:
    """A row of a stage of a chain."""

    stage: str
    remaining: int
    kept: int
    jobs: Sequence[str]


@dataclass(frozen=True, slots=True)
class JobEvidence:
    """What was enqueued, and what has become of it."""

    ledger: Sequence[Enqueued]
    results: Mapping[str, Result]
    """By id."""
    stages: Mapping[str, Stage] = field(default_factory=dict)
    effects: Mapping[str, int] = field(default_factory=Counter)
    """How often the writes of each job with an atomic task were committed."""
    published: Mapping[str, int] = field(default_factory=Counter)
    """How often a message with each id was committed to the outbox."""
    redriven: Mapping[str, int] = field(default_factory=Counter)
    """How often the dead letter of each job was."""
    moved: Mapping[str, int] = field(default_factory=Counter)
    """How often a copy of the message of each job has waited in its place."""
    cancelled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What became of each job by each committed ``cancel_job()``: its status, or ``CANCELLED``."""
    cancelled_at: Mapping[str, float] = field(default_factory=dict)
    """When it was known that a job had ended by ``cancel_job()``, by the clock of ``records.now``."""
    steps: Sequence[Step] = ()
    """Of the tasks; the message ids are those of the jobs, the keys are their tokens."""
    transactions: Sequence[Transaction] = ()
    troubles: Sequence[Trouble] = ()
