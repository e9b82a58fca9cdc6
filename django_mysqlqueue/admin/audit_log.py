"""The audit log in the admin: what operators did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db import Error
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.admin.context import BadQuery, database_among
from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.models import Operation
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin


class ReadOnlyAdmin(_ModelAdmin):
    """An admin without adding, changing or deleting: editing rows would break the queue's protocol."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class DatabaseFilter(admin.SimpleListFilter):
    """The choice of the database whose audit log is listed. There is no list of all: each database has its own log."""

    title = _("database")
    parameter_name = "database"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(alias, alias) for alias in queue_aliases()]

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        # Without a choice for all, and with one that is selected by default.
        chosen = self.value() or queue_aliases()[0]
        for alias in queue_aliases():
            query = changelist.get_query_string({self.parameter_name: alias}, remove=["p"])
            yield {"selected": alias == chosen, "query_string": query, "display": alias}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset  # ``get_queryset`` has chosen the database.


class OperationAdmin(ReadOnlyAdmin):
    """The audit log of one database as a read-only list. Entries are kept for a year."""

    list_display = ("started", "action", "consumer_group", "topic", "changed", "actor", "reason", "detail", "ended")
    list_filter = ("action",)
    search_fields = ("=consumer_group", "=topic", "=actor")
    search_help_text = _("Exact name of a group, topic or user")
    ordering = ("-id",)
    list_per_page = 50
    show_full_result_count = False
    actions = None
    fields = list_display

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        # Read from the queue's database, not from where the router reads: a replica lags behind.
        return super().get_queryset(request).using(self._database(request))

    def get_list_filter(self, request: HttpRequest) -> Any:
        filters = super().get_list_filter(request)
        return [DatabaseFilter, *filters] if len(queue_aliases()) > 1 else filters

    @staticmethod
    def _database(request: HttpRequest) -> str:
        """Return the alias that the list's filter names; on the page of an entry, that of the list it came from."""
        query = request.GET
        if "_changelist_filters" in query:
            query = QueryDict(query["_changelist_filters"])
        return database_among(queue_aliases(), query.get("database"))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Render the list within the time limits of the dashboard; 503 if the database refuses or does not answer."""
        try:
            using = self._database(request)
        except BadQuery as error:
            return HttpResponse(f"{error}\n", status=error.status, content_type="text/plain")
        try:
            with bounded(using):
                response = super().changelist_view(request, extra_context)
                if not isinstance(response, TemplateResponse):
                    return response
                if len(queue_aliases()) > 1 and response.context_data is not None:
                    response.context_data["title"] = f"{response.context_data['title']} ({using})"
                return response.render()
        except Error as error:
            if failures.kind_of(using, error) is None:
                raise
            return HttpResponse(f"{failures.explain(using, error)}\n", status=503, content_type="text/plain")

    @admin.display(description=_("started"), ordering="started_at")
    def started(self, row: Operation) -> str:
        """Return when the operation started."""
        return moment(row.started_at)

    @admin.display(description=_("ended"), ordering="ended_at")
    def ended(self, row: Operation) -> str:
        """Return when the operation ended."""
        return moment(row.ended_at) or str(_("running or interrupted"))
