"""``manage.py demouser``: create a superuser for the demo site on your own machine."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

NAME = PASSWORD = "demo"  # noqa: S105


class Command(BaseCommand):
    help = f"Create the superuser {NAME!r} with the password {PASSWORD!r}. Requires DEBUG."

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.DEBUG:
            raise CommandError("DEBUG is off. A user with a known password is only for your own machine.")
        manager = get_user_model()._default_manager
        if manager.filter(username=NAME).exists():
            self.stdout.write(f"The user {NAME!r} already exists and was not changed.")
            return
        manager.create_superuser(username=NAME, email="", password=PASSWORD)
        self.stdout.write(self.style.SUCCESS(f"Created the superuser {NAME!r} with the password {PASSWORD!r}."))
