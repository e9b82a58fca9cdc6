from __future__ import annotations

from django.apps import AppConfig


class CommitsConfig(AppConfig):
    name = "example_project.commits"
    default_auto_field = "django.db.models.BigAutoField"
