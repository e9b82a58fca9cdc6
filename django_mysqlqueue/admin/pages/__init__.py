"""The dashboard's pages, in the order of the navigation."""

from __future__ import annotations

from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.pages.dead_letters import DeadLetterPage, DeadLettersPage
from django_mysqlqueue.admin.pages.errors import ErrorsPage
from django_mysqlqueue.admin.pages.group import GroupPage
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
from django_mysqlqueue.admin.pages.subscribers import InFlightPage, SubscribersPage
from django_mysqlqueue.admin.pages.tasks import TasksPage

PAGES: tuple[type[Page], ...] = (
    DatabasesPage,
    GroupPage,
    OffsetsPage,
    InFlightPage,
    ErrorsPage,
    DeadLettersPage,
    DeadLetterPage,
    ScheduledPage,
    TasksPage,
    JobsPage,
    JobPage,
    QuarantinePage,
    RecurringPage,
    SubscribersPage,
    MessagesPage,
    MessagePage,
    OperationsPage,
)
