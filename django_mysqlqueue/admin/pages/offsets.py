"""The page of topics, and of offsets: each group's state in each partition."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.admin import charts
from django_mysqlqueue.admin.formatting import messages
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.admin.permissions import may_release
from django_mysqlqueue.inspection import partitions
from django_mysqlqueue.inspection.partitions import ListedGroup, PartitionBacklogs, PartitionPosition
from django_mysqlqueue.inspection.subscribers import read_subscribers
from django_mysqlqueue.inspection.topics import TopicSummary, summarize_topics
from django_mysqlqueue.names.keys import lane_of
from django_mysqlqueue.service import log
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.service.readers import RegisteredReader
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import partition_text

CELLS = 240
"""Maximum number of cells of the heat map. With more partitions, a cell stands for several."""
FURTHEST = "behind"
"""The value of ``order`` for the partitions with the largest backlogs."""
UNKNOWN = 5
"""The level of a cell none of whose partitions was counted in time."""


@dataclass(frozen=True, slots=True)
class Level:
    """An entry of the heat map's legend."""

    key: SafeString
    text: str
    cells: int


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The heat map of a group's backlogs."""

    picture: SafeString
    levels: tuple[Level, ...]
    each: str
    """What a cell stands for."""


def key_text(key: str) -> str:
    """Return the text for a partition on one line."""
    return visible(partition_text(*lane_of(key)))


class OffsetsPage(Page):
    """The list of topics, and of partitions with each group's offsets."""

    name = "offsets"
    title = gettext_lazy("Topics & offsets")
    filters = ("group", "topic", "prefix", "owner", "unowned")
    position = "after"
    shows_several_topics = True
    log_bytes: int | None = None
    readers: Sequence[RegisteredReader] = ()
    last_offset = 0

    def context(self) -> dict[str, Any]:
        session = self.session
        listed = [one for one in partitions.listed_groups(session) if self.may_view(one.ref.topic)]
        wanted, topic = self.text("group"), self.text("topic")
        groups = [one for one in listed if wanted in (None, one.ref.group) and topic in (None, one.ref.topic)]
        one = groups[0] if len(groups) == 1 else None
        self.about = topic if one is None else one.ref.topic
        prefix, owner = self.text("prefix") or "", self._owner()
        backlogs = None
        if one is not None:
            backlogs = partitions.survey(session, one, prefix=prefix, owner=owner, bounds=self.bounds)
        by_backlog = self.text("order") == FURTHEST
        after: PartitionPosition | None = None
        if by_backlog and one is not None and backlogs is not None:
            found = partitions.at(session, one, backlogs.furthest[:PAGE_ROWS], bounds=self.bounds)
            found.sort(key=lambda partition: -partition.lag.value)
        else:
            page = partitions.listing(
                session,
                groups,
                prefix=prefix,
                owner=owner,
                after=self._after(),
                limit=PAGE_ROWS,
                bounds=self.bounds,
            )
            found, after = list(page.partitions), page.after
        is_of_partitions = wanted or by_backlog or prefix or owner is not None or self.text("after")
        names = sorted({one.ref.topic for one in listed} | ({topic} if topic else set()))
        subscribers = read_subscribers(session, lease_ms=self.lease_ms, ref=None if one is None else one.ref)
        return {
            "rows": found,
            "live": {row.name for rows in subscribers.values() for row in rows if row.live},
            "one": one,
            "may_release": one is not None and may_release(self.request, one, found),
            "nothing": self._nothing(of_group=by_backlog and one is not None),
            "groups": sorted({one.ref.group for one in listed}),
            "topics": names,
            "topic_rows": [] if is_of_partitions else self._topics(topic),
            "log_bytes": self.log_bytes,
            "readers": [(one, max(0, self.last_offset - one.offset)) for one in self.readers],
            "by_backlog": by_backlog,
            "order_text": self._order_text(backlogs) if by_backlog and backlogs is not None else _("by key"),
            "heat_map": None if one is None or not backlogs else self._heat_map(one, backlogs),
            "next_place": None if after is None else json.dumps(after),
            "is_first": by_backlog or not self.text("after"),
        }

    def _nothing(self, *, of_group: bool) -> str:
        if of_group:
            return _("No partition with a backlog was found.")
        return _("No partitions match.") if self.is_filtered else _("There are no partitions.")

    def _topics(self, topic: str | None) -> list[TopicSummary]:
        """Return the topics that the user may view, or one of them."""
        found = self.read_overview()
        if topic is None and self.topics_to_view() is None:
            self.log_bytes, self.readers, self.last_offset = found.log_bytes, found.readers, found.last_offset
        names = {topic} if topic is not None else set(found.topics or log.all_topics(self.session))
        groups = [group for group in found.groups if topic in (None, group.ref.topic)]
        visible = [name for name in names if self.may_view(name)]
        return summarize_topics(self.session, visible, groups, found.readers, found.now, bounds=self.bounds)

    def _owner(self) -> str | None:
        """Return the owner that is searched for; an empty string: partitions without an owner; None: all."""
        return "" if self.text("unowned") else self.text("owner")

    def _after(self) -> PartitionPosition | None:
        text = self.text("after")
        if text is None:
            return None
        try:
            group, topic, key = json.loads(text)
            "".join((group, topic, key or "")).encode()  # no database accepts a lone surrogate
        except (ValueError, TypeError, RecursionError):
            group = topic = key = 0
        if not (isinstance(group, str) and isinstance(topic, str) and (key is None or isinstance(key, str))):
            self.no_position()
        return group, topic, key

    @staticmethod
    def _order_text(backlogs: PartitionBacklogs) -> str:
        """Return which partitions were compared, in one sentence."""
        number = len(backlogs.lags)
        if backlogs.whole:
            text = ngettext(
                "furthest behind among the %(number)s partition with messages in the log",
                "furthest behind among the %(number)s partitions with messages in the log",
                number,
            )
        else:
            text = ngettext(
                "furthest behind among the %(number)s partition that was looked at, not of all",
                "furthest behind among the %(number)s partitions that were looked at, not of all",
                number,
            )
        text %= {"number": f"{number:,}"}
        if backlogs.uncounted:
            text += "; " + _("%(number)s of them were not counted in time") % {"number": f"{backlogs.uncounted:,}"}
        return text

    # -- the heat map ---------------------------------------------------------

    def _heat_map(self, group: ListedGroup, backlogs: PartitionBacklogs) -> HeatMap | None:
        """Return the heat map; None if there are no partitions."""
        keys = list(backlogs.lags)
        if not keys:
            return None
        size = -(-len(keys) // CELLS)
        cells = [
            self._cell(group, keys[start : start + size], backlogs.lags, keys[start - 1] if start else None)
            for start in range(0, len(keys), size)
        ]
        each = _("each square is one partition")
        if size > 1:
            each = _("each square is a range of %(number)s partitions") % {"number": f"{size:,}"}
        label = _("Backlog by partition, in order of key: %(each)s") % {"each": each}
        numbers = [cell.level for cell in cells]
        levels = (
            Level(charts.heat_key(level), text, numbers.count(level)) for level, text in enumerate(_level_texts())
        )
        return HeatMap(charts.heat_map(cells, label), tuple(one for one in levels if one.cells), each)

    def _cell(
        self, group: ListedGroup, keys: list[str], lags: Mapping[str, Count | None], before: str | None
    ) -> charts.Cell:
        """Return the cell of some partitions.

        ``before``: the partition before them, if any.
        """
        backlog = total(Count(0, exact=False) if (lag := lags[key]) is None else lag for key in keys)
        number = messages(backlog.value) if backlog.exact else _("%(number)s messages") % {"number": backlog}
        title = f"{key_text(keys[0])}: {number}"
        if len(keys) > 1:
            title = f"{key_text(keys[0])} … {key_text(keys[-1])}: {number}"
        parameters = {"prefix": self.text("prefix"), "owner": self.text("owner"), "unowned": self.text("unowned")}
        if len(keys) == 1 and keys[0]:
            parameters["prefix"] = keys[0]
        elif before is not None:
            parameters["after"] = json.dumps((*group.ref, before))
        link = self.dashboard.url(self.name, group=group.ref.group, topic=group.ref.topic, **parameters)
        return charts.Cell(_level(backlog), title, link)


def _level(backlog: Count) -> int:
    """Return the level of a backlog: 0, 1 to 9, 10 to 99, 100 to 999, 1,000 or more messages."""
    return min(len(str(backlog.value)), 4) if backlog.value else 0 if backlog.exact else UNKNOWN


def _level_texts() -> tuple[str, ...]:
    """Return the texts of the levels for the legend."""
    return (
        _("no backlog"),
        _("1 to 9 messages"),
        _("10 to 99 messages"),
        _("100 to 999 messages"),
        _("1,000 messages or more"),
        _("not counted in time"),
    )
