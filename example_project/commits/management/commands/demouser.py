"""``manage.py demouser``: somebody to log in as, on one's own machine."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

NAME = PASSWORD = "demo"  # noqa: S105


class Command(BaseCommand):
    help = f"Makes a superuser {NAME!r} with the password {PASSWORD!r}; only with DEBUG on."

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.DEBUG:
            raise CommandError("DEBUG is off: a user whose password everybody knows is for one's own machine only.")
        manager = get_user_model()._default_manager
        if manager.filter(username=NAME).exists():
            self.stdout.write(f"There is a user {NAME!r} already; left as it is.")
            return
        manager.create_superuser(username=NAME, email="", password=PASSWORD)
        self.stdout.write(self.style.SUCCESS(f"Made the superuser {NAME!r} with the password {PASSWORD!r}."))
