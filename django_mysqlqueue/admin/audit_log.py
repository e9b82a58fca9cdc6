"""The audit log in the admin: what operators did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db import Error
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.models import Operation
from django_mysqlqueue.service.databases import queue_alias
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


class OperationAdmin(ReadOnlyAdmin):
    """The audit log as a read-only list. Entries are kept for a year."""

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
        return super().get_queryset(request).using(queue_alias())

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Render the list within the time limits of the dashboard; 503 if the database refuses or does not answer."""
        using = queue_alias()
        try:
            with bounded(using):
                response = super().changelist_view(request, extra_context)
                return response.render() if isinstance(response, TemplateResponse) else response
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
