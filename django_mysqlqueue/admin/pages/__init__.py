"""The dashboard's tabs, in the order of the navigation, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.pages.dead_letters import DeadLetterPage, DeadLettersPage
from django_mysqlqueue.admin.pages.group import GroupPage
from django_mysqlqueue.admin.pages.in_flight import InFlightPage
from django_mysqlqueue.admin.pages.job import JobPage
from django_mysqlqueue.admin.pages.jobs import JobsPage
from django_mysqlqueue.admin.pages.message import MessagePage
from django_mysqlqueue.admin.pages.messages import MessagesPage
from django_mysqlqueue.admin.pages.offsets import OffsetsPage
from django_mysqlqueue.admin.pages.operations import OperationsPage
from django_mysqlqueue.admin.pages.overview import DatabasesPage
from django_mysqlqueue.admin.pages.quarantine import QuarantinePage
from django_mysqlqueue.admin.pages.recurring import RecurringPage
from django_mysqlqueue.admin.pages.scheduled import ScheduledPage
from django_mysqlqueue.admin.pages.tasks import TasksPage


@dataclass(frozen=True, slots=True)
class Tab:
    """A tab of the navigation."""

    title: Any
    pages: Sequence[type[Page]]
    """Its pages: it opens the first one, and offers those that are not about one object as views."""

    @property
    def names(self) -> list[str]:
        """The names of its pages."""
        return [page.name for page in self.pages]

    def views(self, request: HttpRequest) -> list[type[Page]]:
        """Return the pages that the user can choose from."""
        return [page for page in self.pages if page.is_in_menu() and page.may_open(request)]


TABS = (
    Tab(gettext_lazy("Overview"), (DatabasesPage,)),
    Tab(gettext_lazy("Topics & offsets"), (OffsetsPage, GroupPage)),
    Tab(gettext_lazy("In flight"), (InFlightPage,)),
    Tab(gettext_lazy("Dead letters"), (DeadLettersPage, DeadLetterPage)),
    Tab(gettext_lazy("Messages"), (MessagesPage, ScheduledPage, QuarantinePage, MessagePage)),
    Tab(gettext_lazy("Jobs"), (TasksPage, JobsPage, RecurringPage, JobPage)),
    Tab(gettext_lazy("Operations"), (OperationsPage,)),
)
PAGES: tuple[type[Page], ...] = tuple(page for tab in TABS for page in tab.pages)
