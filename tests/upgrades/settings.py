"""A project that the last release and the working tree can both run: it may use only what both know."""

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django_mysqlqueue",
    "tests.upgrades.handlers",
]
