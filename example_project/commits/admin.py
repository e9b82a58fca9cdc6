"""Read-only admin pages for the application's tables, which only the handlers write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest

from example_project.commits.models import (
    Commit,
    DailyStatistics,
    OrderViolation,
    RepositoryOrder,
    ReviewTask,
)

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin


class ReadOnlyAdmin(ModelAdmin):
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Commit)
class CommitAdmin(ReadOnlyAdmin):
    list_display = ("repository", "sha", "committed_at", "parents", "files", "insertions", "deletions")
    list_filter = ("repository",)
    search_fields = ("sha",)
    ordering = ("-id",)


@admin.register(DailyStatistics)
class DailyStatisticsAdmin(ReadOnlyAdmin):
    list_display = ("repository", "day", "commits", "merges", "files", "insertions", "deletions")
    list_filter = ("repository",)
    date_hierarchy = "day"
    ordering = ("-day", "repository")


@admin.register(RepositoryOrder)
class RepositoryOrderAdmin(ReadOnlyAdmin):
    list_display = ("repository", "last_sequence", "duplicates")
    ordering = ("repository",)


@admin.register(OrderViolation)
class OrderViolationAdmin(ReadOnlyAdmin):
    list_display = ("repository", "expected", "received", "offset", "found_at")
    list_filter = ("repository",)
    ordering = ("-id",)


@admin.register(ReviewTask)
class ReviewTaskAdmin(ReadOnlyAdmin):
    list_display = ("repository", "sha", "files", "created_at")
    list_filter = ("repository",)
    search_fields = ("sha",)
    ordering = ("-files",)
