"""The list of messages in the log, newest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.context import BadQuery
from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.humanize import duration
from django_mysqlqueue.inspection import LogMessage, MessageListing, list_messages, log_entries
from django_mysqlqueue.limits import LOWEST_PRIORITY, check_priority, lane
from django_mysqlqueue.service import log
from django_mysqlqueue.sql.session import Session

FILTERS = ("topic", "key", "priority", "keyed", "offset", "time", "id")


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in the table."""

    entry: LogMessage
    size: str
    published: str
    age: str


class MessagesPage(Page):
    """The list of messages."""

    name = "messages"
    title = gettext_lazy("Messages")
    template = "messages.html"

    def context(self) -> dict[str, Any]:
        session = Session(self.using)
        topic, key, message_id = self.text("topic"), self._key(), self.text("id")
        self.about = topic
        said, is_newest, upwards = "", True, False
        if message_id is not None:
            found = log_entries.by_id(session, message_id, topic=topic, key=key, bounds=self.bounds)
            listing = MessageListing(found.entries, None, None)
            if not found.entries:
                said = self._nowhere(found, named=key is not None)
        else:
            before, after = self.number("before"), self.number("after")
            if before is None and after is None:
                before = self._start(session)
            is_newest, upwards = before is None and after is None, after is not None
            listing = list_messages(
                topic=topic,
                key=key,
                before=before,
                after=after,
                limit=PAGE_ROWS,
                using=self.using,
                bounds=self.bounds,
            )
            if listing.looked:
                values = {"first": listing.looked[0], "last": listing.looked[1]}
                said = _("This topic has many partitions: only offsets %(first)s to %(last)s were searched.") % values
        now = session.now()
        return {
            "rows": [self._row(entry, now) for entry in listing.entries],
            "listing": listing,
            "is_newest": is_newest,
            "upwards": upwards,
            "said": said,
            "searched": message_id is not None,
            "topics": [one for one in log.all_topics(session) if self.may_view(one)],
            "topic": topic or "",
            "key": key,
            "filtered": any(self.text(name) for name in FILTERS),
            "given": {name: self.request.GET.get(name, "") for name in FILTERS},
        }

    def _key(self) -> str | None:
        """Return the partition key of the query string, or None.

        The empty key is valid, so another parameter tells it from none.
        """
        key = self.text("key")
        if key is None and not self.text("keyed"):
            return None
        if self.text("topic") is None:
            raise BadQuery(_("Enter the topic of the partition, too."))
        return self._lane(key or "")

    def _lane(self, key: str) -> str:
        priority = self.number("priority", minimum=LOWEST_PRIORITY)
        if priority is None:
            return key
        try:
            return lane(key, check_priority(priority))
        except InvalidMessage as error:
            raise BadQuery(str(error)) from None

    def _start(self, session: Session) -> int | None:
        """Return the offset below which the list starts, if the query string has an offset or a time."""
        starts = []
        offset = self.number("offset")
        if offset is not None:
            starts.append(min(offset + 1, log_entries.LAST))
        at = self._time()
        if at is not None:
            starts.append(log.first_since(session, at))
        return min(starts, default=None)

    def _time(self) -> int | None:
        """Return the end of the query string's second, in epoch milliseconds."""
        text = self.text("time")
        if text is None:
            return None
        try:
            found = parse_datetime(text)
            if found is not None and timezone.is_naive(found):
                found = timezone.make_aware(found)
            seconds = None if found is None else found.timestamp()
        except (ValueError, OverflowError):
            seconds = None
        if seconds is None:
            raise BadQuery(_("time=%(value)r is not a valid date and time.") % {"value": text})
        return int(seconds * 1000) + 1000

    def _nowhere(self, found: log_entries.IdSearch, *, named: bool) -> str:
        said = [_("The log has no message with this id.")]
        if not named:
            text = _("All partitions were searched.")
            if not found.complete:
                text = _("Only %(number)s partitions were searched; there are more.") % {
                    "number": f"{self.bounds.searched_partitions:,}"
                }
            said.append(text)
        if found.looked:
            text = _("The id contains its time of creation: offsets %(first)s to %(last)s of that time were searched.")
            said.append(text % {"first": found.looked[0], "last": found.looked[1]})
        said.append(_("For messages that are not due yet, see Scheduled."))
        return " ".join(said)

    @staticmethod
    def _row(entry: LogMessage, now: int) -> MessageRow:
        passed = duration((now - entry.published_at) / 1000)
        return MessageRow(entry, f"{entry.size:,}", moment(entry.published_at), passed)
