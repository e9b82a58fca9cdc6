"""This package with its default settings; the handlers are in ``subscribers``."""

from common import *  # noqa: F403

INSTALLED_APPS = ["django_mysqlqueue", "with_mysqlqueue"]
