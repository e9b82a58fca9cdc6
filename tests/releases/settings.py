"""A project that the last release and the working tree can both run."""

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django_mysqlqueue",
    "tests.releases.handlers",
]
