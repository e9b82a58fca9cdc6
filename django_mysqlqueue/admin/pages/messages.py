"""The list of messages in the log, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import contents
from django_mysqlqueue.admin.context import BadQuery
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.inspection import LogMessage, MessageListing, list_messages, log_entries
from django_mysqlqueue.names.keys import LOWEST_PRIORITY, check_priority, lane
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import log
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import shortened

READ_BYTES = 2000
"""Number of bytes of each payload that the list reads."""
SHOWN = 120
"""Number of characters of a payload in the list."""
TEXT_LENGTH = 200
"""Maximum length of a text to search."""


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in the table."""

    entry: LogMessage
    payload: str | None
    """The beginning of its payload, redacted; None if the user may not view it."""


class MessagesPage(Page):
    """The list of messages."""

    name = "messages"
    title = gettext_lazy("Messages")
    filters = ("topic", "key", "priority", "keyed", "offset", "time", "id", "contains")

    def context(self) -> dict[str, Any]:
        session = self.session
        topic, message_id = self.text("topic"), self.text("id")
        needs_topic = self._needs_topic()
        key = None if needs_topic else self._key()
        self.about = topic
        said, is_newest, upwards = needs_topic, True, False
        contains = self.text("contains")
        # The search is more expensive than other pages.
        self.live = contains is None
        if needs_topic:
            listing = MessageListing([], None, None)
        elif message_id is None and contains is not None and topic is not None:
            before = self.number("before")
            is_newest = before is None
            listing, said = self._containing(session, contains, topic, key, self._start(session, before))
        elif message_id is not None:
            found = log_entries.by_id(session, message_id, topic=topic, key=key, bounds=self.bounds)
            listing = MessageListing(found.entries, None, None)
            if not found.entries:
                said = self._nowhere(found, named=key is not None)
        else:
            before, after = self.number("before"), self.number("after")
            if before is None and after is None:
                before = self._start(session, None)
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
        shown = self._payloads(session, listing.entries)
        return {
            "rows": [MessageRow(entry, shown.get(entry.offset)) for entry in listing.entries],
            "may_see_payloads": bool(shown) or self.may_see_payloads,
            "text_length": TEXT_LENGTH,
            "listing": listing,
            "is_newest": is_newest,
            "upwards": upwards,
            "said": said,
            "needs_topic": needs_topic,
            "searched": message_id is not None or bool(needs_topic),
            "topics": [one for one in log.all_topics(session) if self.may_view(one)],
            "topic": topic or "",
            "keyed": key is not None or bool(self.text("keyed")),
        }

    def _needs_topic(self) -> str:
        """Return which filter needs a topic that the query string does not have; empty if none does."""
        if self.text("topic") is not None:
            return ""
        if self.text("key") or self.text("keyed"):
            return _("Enter the topic of the partition, too.")
        if self.text("contains") and not self.text("id"):
            return _("Enter the topic to search in, too.")
        return ""

    def _key(self) -> str | None:
        """Return the partition key of the query string, or None; ``keyed`` tells the empty key from none."""
        key = self.text("key")
        if key is None and not self.text("keyed"):
            return None
        priority = self.number("priority", minimum=LOWEST_PRIORITY)
        try:
            return (key or "") if priority is None else lane(key or "", check_priority(priority))
        except InvalidMessage as error:
            raise BadQuery(str(error)) from None

    def _containing(
        self, session: Session, text: str, topic: str, key: str | None, before: int | None
    ) -> tuple[MessageListing, str]:
        """Search a text in the newest messages of a topic; return what was found, and what was searched."""
        if len(text) > TEXT_LENGTH:
            raise BadQuery(_("The text to search is too long: at most %(most)s characters.") % {"most": TEXT_LENGTH})
        if not self.may_see_payloads:
            raise BadQuery(_("To search in contents, you need the permission to view payloads of the topic."), 403)
        found = log_entries.search(
            session, text, topic=topic, key=key, before=before, limit=PAGE_ROWS, bounds=self.bounds
        )
        if found.offsets is None:
            return MessageListing([], None, found.older, None), ""
        first, last = found.offsets
        values = {"number": f"{found.searched:,}", "size": f"{found.read:,}", "first": first, "last": last}
        text = _("Searched: %(number)s messages with %(size)s bytes of payloads, offsets %(first)s to %(last)s.")
        said = text % values
        if found.older is None:
            said = f"{said} {_('There are no older ones.')}"
        return MessageListing(found.entries, None, found.older, found.offsets), said

    def _payloads(self, session: Session, entries: Sequence[LogMessage]) -> dict[int, str]:
        """Return by offset the beginnings of the payloads that the user may view."""
        topics = self.with_payloads(entry.topic for entry in entries)
        sizes = {entry.offset: entry for entry in entries if entry.topic in topics}
        found = log_entries.beginnings(session, list(sizes), READ_BYTES) if sizes else {}
        return {offset: _payload(sizes[offset], one.payload) for offset, one in found.items()}

    def _start(self, session: Session, before: int | None) -> int | None:
        """Return the offset below which the list starts, if the query string has an offset or a time."""
        starts = [] if before is None else [before]
        offset = self.number("offset")
        if offset is not None:
            starts.append(min(offset + 1, log_entries.LAST))
        at = self.time("time")
        if at is not None:
            starts.append(log.first_since(session, at + 1000))  # the end of that second
        return min(starts, default=None)

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


def _payload(entry: LogMessage, beginning: bytes) -> str:
    """Return the beginning of a payload on one line, redacted."""
    if entry.size > READ_BYTES and get_settings().redact is not None:
        # REDACT might not recognize a part of what it hides.
        return _("(too long to redact)")
    text = beginning.decode(errors="backslashreplace")
    if entry.size <= READ_BYTES:
        text = contents.payload(beginning, entry.size, topic=entry.topic)
    return shortened(" ".join(text.split()), most=SHOWN)
