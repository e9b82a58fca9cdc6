"""The page of a consumer group, with the partitions whose messages wait longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.admin import causes
from django_mysqlqueue.admin.causes import Banner, ShownCause
from django_mysqlqueue.admin.context import BadQuery
from django_mysqlqueue.admin.history_charts import DEFAULT, make_history
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.permissions import may_release, may_view_operations, text_of
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.inspection import (
    GroupOverview,
    Partition,
    find_problems,
    get_overview,
    operations_log,
    partitions,
)
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.inspection.causes import state_of
from django_mysqlqueue.inspection.subscribers import mean_handler_ms, read_busy
from django_mysqlqueue.inspection.trends import (
    SETTLED_MINUTES,
    SPANS,
    passed_texts,
    read_history,
    read_row,
    with_samples,
)
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.service.rollups import Bucket
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import duration


class GroupPage(Page):
    """The page of a consumer group."""

    name = "group"
    title = gettext_lazy("Group")
    in_menu = False

    def heading(self) -> str:
        ref = self.ref()
        return str(self.title) if ref is None else _("Group %(ref)s") % {"ref": ref}

    def context(self) -> dict[str, Any]:
        ref = self.ref()
        if ref is None:
            raise BadQuery(_("The parameters group and topic are required."))
        self.about = ref.topic
        overview = with_samples(get_overview(group=ref.group, topic=ref.topic, using=self.using, bounds=self.bounds))
        if not overview.groups:
            raise BadQuery(_("There is no group %(ref)s.") % {"ref": ref}, 404)
        (group,), now = overview.groups, overview.now
        self.now = now
        session = self.session
        found = partitions.at(session, group, [head.key for head in group.heads], bounds=self.bounds)
        problems = find_problems(overview, stall_times=self.stall_times)
        state = state_of(overview, [one for one in problems if one.ref == ref])
        since = now - SETTLED_MINUTES * 60_000
        buckets = rollups.of_group(session, rollups.MINUTE, since, ref, now=now)
        name = self.text("range")
        name = name if name in SPANS else DEFAULT
        return {
            "group": group,
            "is_of_jobs": is_of_jobs(ref),
            # The causes follow at once, the worst first, so the banner does not repeat it.
            "banner": Banner(replace(state.status, text="", advice="") if state.causes else state.status),
            **causes.split(
                [self._without_self(one) for one in causes.shown(self.dashboard, state.causes, now, self.errors)]
            ),
            "figures": read_row(group, state.problems, buckets, now),
            "paused_by": self._paused_by(session, group, now),
            "priorities": _priorities(group),
            "history": make_history(name, read_history(session, ref, SPANS[name], now)),
            **self._passed(group, buckets),
            "handlers": _handlers(session, group, now, self.bounds),
            "sees_operations": may_view_operations(self.request),
            "live": {row.name for row in group.live},
            "rows": [_counted(partition, group) for partition in found],
            "nothing": _("No unsettled messages."),
            "may_release": may_release(self.request, group, found),
            **self._options(group),
        }

    def _paused_by(self, session: Session, group: GroupOverview, now: int) -> str:
        """Return who has paused the group, when and why; empty if it is not paused or the audit log does not say."""
        if not group.paused:
            return ""
        pauses = operations_log.pauses_of(session, {group.ref: group.registered_at}, bounds=self.bounds)
        found = pauses.get(group.ref)
        if found is None:
            return ""
        text = _("by %(actor)s %(age)s ago: %(reason)s") if found.reason else _("by %(actor)s %(age)s ago")
        age = duration((now - found.started_at) / 1000)
        return text % {"actor": visible(found.actor), "age": age, "reason": visible(found.reason)}

    def _without_self(self, one: ShownCause) -> ShownCause:
        """Return a cause without links to this page."""
        symptoms = [replace(each, link="", action="") if self._is_self(each.link) else each for each in one.symptoms]
        found = replace(one, symptoms=symptoms)
        return replace(found, link="", action="") if self._is_self(one.link) else found

    def _is_self(self, link: str) -> bool:
        ref = self.ref()
        return ref is not None and link == self.dashboard.url("group", group=ref.group, topic=ref.topic)

    @staticmethod
    def _passed(group: GroupOverview, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Return the group's filter for people, and how many messages were lately settled without a call, by reason."""
        numbers = {reason: sum(getattr(one, reason) for one in buckets) for reason in rollups.PASSED}
        found: dict[str, Any] = {"passed_minutes": SETTLED_MINUTES}
        if group.filter is not None:
            # The reason is one of the problems on the page.
            broken = isinstance(group.filter, str)
            found["filter"] = _("cannot be parsed by this release") if broken else str(group.filter)
            found["filtered"] = f"{numbers.pop('filtered'):,}"
        return {**found, "passed": passed_texts(numbers)}

    def _options(self, group: GroupOverview) -> dict[str, Any]:
        """Return the group's options, or why they are not known: this page must not fail because of a handler."""
        try:
            found = group.options
        except (SubscriberError, ImportError) as error:
            return {"options_error": text_of(self.request, error)}
        is_changed = {one.name: one.source != "default" or one.registered_text or one.override for one in found}
        return {
            "changed": [one for one in found if is_changed[one.name]],
            "unchanged": [one for one in found if not is_changed[one.name]],
        }


def _counted(partition: Partition, group: GroupOverview) -> Partition:
    """Return a partition with the group's own count if that got further: the other one counts those for others, too."""
    counts = (partition.lag, group.backlog_of(partition.key))
    return partition if partition.lag.exact else replace(partition, lag=max(counts, key=lambda one: one.value))


def _handlers(session: Session, group: GroupOverview, now: int, bounds: Bounds) -> str:
    """Return how busy the handlers are, and how long they take; empty if it is not known."""
    found = read_busy(session, group.ref, group.live, bounds=bounds)
    if found is None:
        return ""
    text = ngettext(
        "%(busy)s of %(threads)s threads busy in %(processes)s process",
        "%(busy)s of %(threads)s threads busy in %(processes)s processes",
        found.processes,
    ) % {"busy": f"{found.busy:,}", "threads": f"{found.threads:,}", "processes": f"{found.processes:,}"}
    mean = mean_handler_ms(session, group.ref, now)
    if mean is None:
        return text
    return _("%(busy)s, mean time per call %(time)s") % {"busy": text, "time": duration(mean / 1000)}


def _priorities(group: GroupOverview) -> str:
    """Return the backlog of each priority, or an empty string if there is only the default one."""
    found = group.lag_by_priority
    return ", ".join(f"{priority}: {count}" for priority, count in found.items()) if any(found) else ""
