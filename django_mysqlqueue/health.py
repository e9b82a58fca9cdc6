"""The queue as a check of django-health-check (version 4). Needs the extra ``health``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections
from health_check.base import HealthCheck
from health_check.exceptions import ServiceUnavailable

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.service import failures, health
from django_mysqlqueue.service.health import Finding, Limits
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.service.transactions import bounded


@dataclasses.dataclass
class QueueHealth(HealthCheck):  # type: ignore[misc]  # it has no types
    """Fails if messages are stuck, handlers fail or a limit is exceeded, as ``manage.py queuehealth`` does.

    What it says names groups and topics, and no key, since such pages are often public.

    Args:
        max_lag: unsettled messages that a group may have (below 10,000, where counts stop).
        max_age: seconds that a message may wait for its group, or in the outbox.
        max_dead_letters: dead letters that a group may have.
        min_subscribers: live subscribers that a group must have.
        max_recent_dead_letters: dead letters that a group may have within the window; None: as the setting
            ``HEALTH`` says, as for the next three.
        max_failure_ratio: share of a group's attempts within the window that may fail, 0 to 1.
        min_attempts: attempts within the window below which the ratio is not judged.
        window: seconds that count as recent, 60 to 21,600.
        groups: only these consumer groups; empty: all.
        topics: only these topics; empty: all.
        using: the queue's database alias, if not the setting's.
    """

    max_lag: int | None = None
    max_age: float | None = None
    max_dead_letters: int | None = None
    min_subscribers: int | None = None
    groups: Sequence[str] = ()
    topics: Sequence[str] = ()
    using: str | None = None
    max_recent_dead_letters: int | None = None
    max_failure_ratio: float | None = None
    min_attempts: int | None = None
    window: float | None = None

    def __post_init__(self) -> None:
        self._limits = Limits(
            self.max_lag,
            self.max_age,
            self.max_dead_letters,
            self.min_subscribers,
            recent_dead_letters=self.max_recent_dead_letters,
            failure_ratio=self.max_failure_ratio,
            min_attempts=self.min_attempts,
            window=self.window,
        )

    def run(self) -> None:
        """Looks once; in a thread, whose connection it closes.

        Raises:
            ServiceUnavailable: what is wrong, or that the database refuses or does not answer within 20 s.
        """
        alias = queue_alias(self.using)
        try:
            with bounded(alias), connections[alias].temporary_connection():
                report = health.check(alias, self._limits, groups=self.groups, topics=self.topics)
        except (OperationRefused, ImproperlyConfigured) as error:
            raise ServiceUnavailable(str(error)) from error
        except Error as error:
            raise ServiceUnavailable(f"{failures.summarize(alias, error)}.") from error
        if report.findings:
            raise ServiceUnavailable(" ".join(_public(finding) for finding in report.findings))


def _public(finding: Finding) -> str:
    """The text, unless it names a partition: keys are often people."""
    return finding.text if finding.key is None else f"{finding.ref}: {finding.kind}."
