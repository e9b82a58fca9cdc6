"""A check for django-health-check (version 4). It needs the extra ``health``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections
from django.utils.translation import gettext_lazy
from health_check.base import HealthCheck
from health_check.exceptions import ServiceUnavailable

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import HealthFinding, HealthLimits, HealthReport, check_health
from django_mysqlqueue.inspection.health import check_selected, databases_of, require_registered
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded
from django_mysqlqueue.sql.several import start_each

__all__ = ["QueueHealth"]

_OF_THE_QUEUE = {
    "deaths": gettext_lazy("Several processes have died."),
    "refused": gettext_lazy("A subscriber has refused to start."),
}
"""By kind of problem, what is shown of one of the whole queue whose text is hidden."""


@dataclasses.dataclass
class QueueHealth(HealthCheck):  # type: ignore[misc]  # it has no types
    """Fails if messages are stuck, handlers fail or a limit is exceeded, as ``manage.py queuehealth`` does.

    Its texts name groups and topics, but no keys, ids, hosts, users and errors, since health pages are often public.

    Args:
        max_lag: maximum number of unsettled messages per group; less than 10,000, because counting stops there.
        max_age: maximum age, in seconds, of an unsettled message or of one that is due in the outbox.
        max_dead_letters: maximum number of dead letters per group.
        min_subscribers: minimum number of live subscribers per group.
        max_recent_dead_letters: maximum number of dead letters per group within the window (default, as for the
            next three: the setting ``HEALTH``).
        max_failure_ratio: maximum share of a group's newest attempts that fail, 0 to 1.
        min_attempts: number of newest attempts whose share counts; with fewer within the window, the ratio is not
            checked.
        window: length, in seconds, of the window that ends now; 60 to 21,600.
        groups: check only these consumer groups; if empty, all.
        topics: check only these topics; if empty, all.
        using: alias of the only database to check (default: those of the topics, with the ones in ``VIA`` and
            ``MOVES_FROM``; without topics, all of the queue's).
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
        self._limits = HealthLimits(
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
        """Run the check once. It runs in a thread and closes that thread's connections.

        With several databases, they are checked at the same time, and the text says in which one a problem is.

        Raises:
            ServiceUnavailable: the queue is unhealthy, or a database refuses or does not answer within 20 seconds.
                The text says which.
        """
        aliases = databases_of(self.topics) if self.using is None else [queue_alias(self.using)]
        try:
            problems = self._run_on(aliases[0]) if len(aliases) == 1 else self._run_on_each(aliases)
        except (OperationRefused, ImproperlyConfigured) as error:
            raise ServiceUnavailable(str(error)) from error
        if problems:
            raise ServiceUnavailable(" ".join(problems))

    def _run_on(self, alias: str) -> list[str]:
        try:
            with bounded(alias), connections[alias].temporary_connection():
                report = check_health(self._limits, groups=self.groups, topics=self.topics, using=alias)
        except Error as error:
            raise ServiceUnavailable(f"{failures.summarize(alias, error)}.") from error
        return [_public(finding) for finding in report.findings]

    def _run_on_each(self, aliases: Sequence[str]) -> list[str]:
        def check(alias: str) -> HealthReport:
            with connections[alias].temporary_connection():
                return check_selected(self._limits, groups=self.groups, topics=self.topics, using=alias)

        problems: list[str] = []
        reports: list[HealthReport] = []
        for alias, answer in start_each(aliases, check).items():
            try:
                report = answer.result()
            except Error as error:
                problems.append(f"{failures.summarize(alias, error)}.")
            else:
                reports.append(report)
                problems += [f"Database {alias!r}: {_public(finding)}" for finding in report.findings]
        if len(reports) == len(aliases):
            require_registered((one.state for one in reports), groups=self.groups, topics=self.topics)
        return problems


def _public(finding: HealthFinding) -> str:
    """Return the text of a finding, but not one with a partition key or an id, which often identify a person.

    Hosts, users and errors help attackers.
    """
    if finding.key is None and finding.message_id is None and not finding.is_private:
        return finding.text
    if name := finding.ref or finding.topic:
        return f"{name}: {finding.kind}."
    return str(_OF_THE_QUEUE.get(finding.kind, f"{finding.kind}."))
