"""The base class of the dashboard's pages."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from django_mysqlqueue import naming
from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.permissions import may_operate, may_see_payloads, topics_to_view
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.inspection import PAGES, Bounds, StallTimes
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded

SPARK_MINUTES = 30
"""Number of minutes up to now whose counts are shown for each group."""
PAGE_ROWS = 50
"""Maximum number of rows per page."""


class BadQuery(Exception):
    """The query string is invalid. The page shows the text."""

    status: ClassVar[int] = 400


class Refused(BadQuery):
    """The query string asks for data that the user may not read. The page shows the text."""

    status = 403


class Page:
    """One page for one request: ``context`` reads the data for the template.

    A page changes nothing. A browser requests a live page again every few seconds.
    """

    do_not_call_in_templates = True

    name: ClassVar[str]
    """Name of the URL, and path below the dashboard's."""
    title: ClassVar[Any]
    template: ClassVar[str]
    in_menu: ClassVar[bool] = True
    live: ClassVar[bool] = True
    """True if the page refreshes itself."""
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
        self.about: str | None = None
        """The only topic that the page is about, set by ``context``: permissions on it suffice. None: several."""
        self.lease_ms = int(get_settings().lease_duration * 1000)

    def context(self) -> dict[str, Any]:
        """Return the template's context, apart from that of all pages."""
        raise NotImplementedError

    def heading(self) -> str:
        """Return the page's title, with the name of its object."""
        return str(self.title)

    def may_view(self, topic: str) -> bool:
        """Return whether the user may view a topic."""
        topics = topics_to_view(self.request)
        return topics is None or naming.first_topic(topic) in topics

    def _demand_topic(self, topic: str | None) -> None:
        """Refuse the page unless the user may view the topic that it is about; None: it is about several.

        Raises:
            Refused: the user may not. The text is the same for topics that do not exist.
        """
        topics = topics_to_view(self.request)
        if topics is None or (self.shows_several_topics if topic is None else self.may_view(topic)):
            return
        named = ", ".join(sorted(topics))
        raise Refused(_("You may view these topics: %(topics)s. Choose one of them.") % {"topics": named})

    @property
    def may_see_payloads(self) -> bool:
        """Whether the user may view payloads and metadata on this page."""
        return may_see_payloads(self.request, self.about)

    # -- the query string -----------------------------------------------------

    def text(self, name: str) -> str | None:
        """Return a parameter of the query string, or None if it is missing or empty."""
        return self.request.GET.get(name) or None

    def number(self, name: str, *, minimum: int = 0) -> int | None:
        """Return an integer of the query string, or None if it is missing or empty.

        Args:
            name: the parameter.
            minimum: smallest valid number.

        Raises:
            BadQuery: the value is not an integer, or too small or too large.
        """
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

    def ref(self) -> GroupRef | None:
        """Return the group that the query string names, or None."""
        group, topic = self.text("group"), self.text("topic")
        return GroupRef(group, topic) if group and topic else None

    # -- the response ---------------------------------------------------------

    def respond(self) -> HttpResponse:
        """Return the rendered page, or the reason why there is none with an error status.

        The status is 400 or 403 for the query string, 500 for an invalid setting, and 503 if the database refuses or
        does not answer.
        """
        try:
            with bounded(self.using):
                if (topic := self.text("topic")) is not None:
                    self._demand_topic(topic)
                try:
                    found = self.context()
                except BadQuery:
                    # Of a message that does not exist, too: otherwise, others could be told from those that do.
                    self._demand_topic(self.about)
                    raise
                self._demand_topic(self.about)
                # Render here, so that the time limit covers queries of the template.
                return self._response(found).render()
        except BadQuery as error:
            status, problem = error.status, str(error)
        except ImproperlyConfigured as error:
            status, problem = 500, str(error)
        except Error as error:
            if failures.kind_of(self.using, error) is None:
                raise
            status, problem = 503, failures.explain(self.using, error)
        return self._response({}, status, problem)

    def _response(self, found: dict[str, Any], status: int = 200, problem: str = "") -> TemplateResponse:
        context = {
            **found,
            "title": self.heading(),
            "page": self,
            "problem": problem,
            "may_operate": may_operate(self.request, self.about),
            "may_see_payloads": found.get("may_see_payloads", self.may_see_payloads),
        }
        return self.dashboard.response(self.request, self.template, context, status)
