"""The base class of the dashboard's pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn, TypeVar

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.http import HttpRequest, HttpResponseBase
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from django_mysqlqueue.admin import csv_export
from django_mysqlqueue.admin.causes import Banner
from django_mysqlqueue.admin.context import BadQuery, DashboardContext, choose_database
from django_mysqlqueue.admin.csv_export import Export
from django_mysqlqueue.admin.error_texts import ErrorTexts
from django_mysqlqueue.admin.permissions import may, may_view_in, topics_to_view, visible
from django_mysqlqueue.admin.status import read_overview, read_shared
from django_mysqlqueue.inspection import PAGES, Bounds, Problem, QueueOverview, StallTimes, find_problems, get_overview
from django_mysqlqueue.inspection.causes import QueueState, state_of, unavailable
from django_mysqlqueue.inspection.trends import with_samples
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import first_topic, is_dlq
from django_mysqlqueue.permissions import OPERATE, PUBLISH, SEE_PAYLOADS
from django_mysqlqueue.service.counts import total
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text import escaping

UNAVAILABLE = 503
"""The HTTP status of a page whose database refuses or does not answer."""
PAGE_ROWS = 50
"""Maximum number of rows per page."""

Position = TypeVar("Position")


class Page:
    """One page for one request: ``context`` reads the data for the template.

    A page changes nothing. A browser requests a live page again every few seconds.
    """

    do_not_call_in_templates = True

    name: ClassVar[str]
    """Name of the URL, and path below the dashboard's."""
    title: ClassVar[Any]
    template: str = ""
    """File name of the template (default: ``<name>.html``)."""
    filters: ClassVar[Sequence[str]] = ()
    """The parameters that restrict what the page lists: ``given`` in the template."""
    position: ClassVar[str] = ""
    """The parameter from which on the list continues. ``next_place`` in the template is its value for the next page."""
    in_menu: ClassVar[bool] = True
    """True if the navigation may have it: it is not about one object."""
    live: bool = True
    """True if the page refreshes itself."""
    pause: int = 4
    """Seconds between two refreshes."""
    exports: ClassVar[bool] = False
    """True if the page has its list as CSV, too: ``export``."""
    shows_all_databases: ClassVar[bool] = False
    """True if the page is about all databases unless the query string names one."""
    shows_several_topics: ClassVar[bool] = False
    """True if the page without a topic shows only what the user may view. Others then require the permission to view
    all topics."""
    bounds: ClassVar[Bounds] = PAGES
    """Limits of how much it reads."""
    stall_times: ClassVar[StallTimes] = StallTimes()
    """Times after which a lack of progress is a problem."""

    def __init__(self, dashboard: DashboardContext, request: HttpRequest) -> None:
        self.dashboard = dashboard
        self.request = request
        self.using = queue_alias()
        """Alias of the database that the page is about, set by ``respond``."""
        self.about: str | None = None
        """The only topic that the page is about, set by ``context``: permissions on it suffice. None: several."""
        self.lease_ms = int(get_settings().lease_duration * 1000)
        self.errors = ErrorTexts(request)

    @classmethod
    def is_in_menu(cls) -> bool:
        return cls.in_menu

    @classmethod
    def may_open(cls, request: HttpRequest) -> bool:
        """Return whether a user who may view the dashboard, or a topic in it, may open the page."""
        return True

    def context(self) -> dict[str, Any]:
        """Return the template's context, apart from that of all pages."""
        raise NotImplementedError

    def export(self) -> Export:
        """Return the list as CSV; its rows are read later, on connections of their own, see ``reading``."""
        raise NotImplementedError

    def reading(self) -> AbstractContextManager[None]:
        return bounded(self.using)

    def read_pages(
        self, read: Callable[[Position | None], tuple[Iterable[Sequence[Any]], Position | None]], place: Position | None
    ) -> Iterator[list[Sequence[Any]]]:
        """Yield the rows of an export from a position on; ``read`` returns some of them, and the next position."""
        while True:
            with self.reading():
                rows, place = read(place)
                found = list(rows)
            yield found
            if place is None:
                return

    def heading(self) -> str:
        return str(self.title)

    @property
    def session(self) -> Session:
        """A session on the connection that is open now."""
        return Session(self.using)

    @cached_property
    def now(self) -> int:
        """The time of the page by the database's clock, in epoch milliseconds."""
        return self.session.now()

    def may_view(self, topic: str) -> bool:
        topics = self.topics_to_view()
        return topics is None or first_topic(topic) in topics

    def topics_to_view(self) -> frozenset[str] | None:
        """Return the topics that the user may view; None: all."""
        return topics_to_view(self.request, self.using)

    def _demand_topic(self, topic: str | None) -> None:
        """Refuse the page, in the same words if there is no such topic, unless the user may view it; None: several."""
        if self.topics_to_view() is None or (self.shows_several_topics if topic is None else self.may_view(topic)):
            return
        # Those of all databases: each leads to its own.
        topics = {topic for found in visible(self.request).topics.values() for topic in found or ()}
        named = ", ".join(sorted(topics))
        raise BadQuery(_("You may view these topics: %(topics)s. Choose one of them.") % {"topics": named}, 403)

    def operable(self, topics: Iterable[str]) -> set[str]:
        """Return those of some topics on which the user may run operations."""
        return {topic for topic in set(topics) if may(self.request, topic, OPERATE)}

    def with_payloads(self, topics: Iterable[str]) -> set[str]:
        """Return those of some topics whose payloads and metadata the user may view."""
        return {topic for topic in set(topics) if may(self.request, topic, SEE_PAYLOADS)}

    @property
    def may_see_payloads(self) -> bool:
        """Whether the user may view payloads and metadata on this page."""
        return may(self.request, self.about, SEE_PAYLOADS)

    @property
    def may_publish(self) -> bool:
        """Whether the user may publish test messages to the topic that this page is about, or to all topics."""
        return not (self.about and is_dlq(self.about)) and may(self.request, self.about, PUBLISH)

    def read_state(self) -> QueueState:
        """Read the state of the page's database, with the groups and problems that the user may view."""
        if self.topics_to_view() is None:
            return read_shared(self.using, self.bounds, self.stall_times)
        overview = self.read_overview()
        problems = find_problems(overview, stall_times=self.stall_times)
        return state_of(overview, [one for one in problems if self._may_view_problem(one)])

    def read_overview(self) -> QueueOverview:
        """Read the groups of the page's database that the user may view."""
        topics = self.topics_to_view()
        if topics is None:
            return read_overview(self.using, self.bounds)
        found = [
            with_samples(get_overview(topic=topic, using=self.using, bounds=self.bounds)) for topic in sorted(topics)
        ]
        groups = tuple(group for one in found for group in one.groups)
        # Without figures of the whole queue.
        return replace(found[0], groups=groups, dead_letters=total(one.dead_letters for one in found))

    def _may_view_problem(self, problem: Problem) -> bool:
        topic = problem.topic if problem.ref is None else problem.ref.topic
        return self.topics_to_view() is None if not topic else self.may_view(topic)

    # -- the query string -----------------------------------------------------

    @property
    def is_filtered(self) -> bool:
        """Whether the query string has one of the ``filters``."""
        return any(self.text(name) for name in self.filters)

    def text(self, name: str) -> str | None:
        """Return a parameter of the query string, or None if it is missing or empty.

        If it is the escaped form of the text in the parameter ``exact_<name>``, that text is returned: an input would
        lose the end of a line, see the template tag ``queue_text``.
        """
        value = self.request.GET.get(name) or None
        exact = self.request.GET.get(f"exact_{name}")
        if value is None or exact is None:
            return value
        try:
            text = json.loads(exact)
            return text if escaping.visible(text) == value and text.encode() else value
        except (ValueError, TypeError, AttributeError, RecursionError):
            return value

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        """Return one of some values, or None if the parameter is missing or empty; refuse others."""
        value = self.text(name)
        if value is not None and value not in choices:
            text = _("%(name)s=%(value)r is not one of %(choices)s.")
            raise BadQuery(text % {"name": name, "value": value, "choices": ", ".join(choices)})
        return value

    def no_position(self) -> NoReturn:
        """Refuse the value of the parameter ``position``."""
        text = _("%(name)s=%(value)r is not a position in the list.")
        raise BadQuery(text % {"name": self.position, "value": self.text(self.position)})

    def number(self, name: str, *, minimum: int = 0) -> int | None:
        """Return an integer of the query string, or None if it is missing or empty; refuse others."""
        value = self.text(name)
        if value is None:
            return None
        try:
            found = int(value)
        except ValueError:
            found = minimum - 1
        if not minimum <= found < 2**63:
            raise BadQuery(f"{name}={value!r}: must be an integer of at least {minimum}")
        return found

    def time(self, name: str) -> int | None:
        """Return a time of the query string, in the project's time zone, as epoch milliseconds."""
        text = self.text(name)
        if text is None:
            return None
        try:
            found = parse_datetime(text)
            if found is not None and timezone.is_naive(found):
                zone = timezone.get_current_timezone() if django_settings.USE_TZ else timezone.get_default_timezone()
                found = timezone.make_aware(found, zone)
            seconds = None if found is None else found.timestamp()
        except (ValueError, OverflowError):
            seconds = None
        if seconds is None:
            raise BadQuery(_("%(name)s=%(text)r is not a valid date and time.") % {"name": name, "text": text})
        return max(0, int(seconds * 1000))

    def period(self) -> tuple[int | None, int | None]:
        """Return the times ``since`` and ``until`` of the query string, both inclusive, as epoch milliseconds."""
        since, until = self.time("since"), self.time("until")
        # Forms have whole seconds: include all of the last one.
        return since, None if until is None else until + 999

    def ref(self) -> GroupRef | None:
        """Return the group that the query string names, or None."""
        group, topic = self.text("group"), self.text("topic")
        return GroupRef(group, topic) if group and topic else None

    # -- the response ---------------------------------------------------------

    def respond(self) -> HttpResponseBase:
        """Return the rendered page, or the reason why there is none with an error status."""
        try:
            self._choose_database()
            if (unread := visible(self.request).unread.get(self.using)) is not None:
                return self._response({}, UNAVAILABLE, unread.reason)
            with self.reading():
                if (topic := self.text("topic")) is not None:
                    self._demand_topic(topic)
                is_export = self.exports and self.text("format") == "csv"
                try:
                    found = self.export() if is_export else self.context()
                except BadQuery:
                    # Of a message that does not exist, too: otherwise, others could be told from those that do.
                    self._demand_topic(self.about)
                    raise
                self._demand_topic(self.about)
                if isinstance(found, Export):
                    return csv_export.response(found)
                # Render here, so that the time limit covers queries of the template.
                return self._response(found).render()
        except BadQuery as error:
            status, problem = error.status, str(error)
        except ImproperlyConfigured as error:
            status, problem = 500, str(error)
        except Error as error:
            if failures.kind_of(self.using, error) is None:
                raise
            status, problem = UNAVAILABLE, failures.explain(self.using, error)
        return self._response({}, status, problem)

    def _choose_database(self) -> None:
        wanted = self.text("database")
        self.using = choose_database(self.request, wanted, self.text("topic"))
        if wanted or not self.shows_all_databases:
            self.dashboard = self.dashboard.on(self.using)

    @property
    def list_name(self) -> str:
        """The page's name, or for the page of one object, which other databases do not have, that of the overview."""
        return self.name if self.in_menu else "changelist"

    def _home_of_topic(self) -> str:
        """Return the alias of the topic's own database, if the page shows another one; otherwise an empty string."""
        topic = self.text("topic")
        if not (self.dashboard.database and topic):
            return ""
        home = queue_alias(topic=topic)
        return home if home != self.using and may_view_in(self.request, topic, home) else ""

    def _response(self, found: dict[str, Any], status: int = 200, problem: str = "") -> TemplateResponse:
        context = {
            "given": {name: self.text(name) or "" for name in self.filters},
            "filtered": self.is_filtered,
            "is_first": not self.text(self.position),
            **found,
            "title": self.heading(),
            "page": self,
            "problem": problem,
            **({"banner": Banner(unavailable(self.using, problem))} if status == UNAVAILABLE else {}),
            "home": self._home_of_topic(),
            "may_operate": may(self.request, self.about, OPERATE),
            "may_see_payloads": found.get("may_see_payloads", self.may_see_payloads),
        }
        return self.dashboard.response(self.request, self.template or f"{self.name}.html", context, status)
