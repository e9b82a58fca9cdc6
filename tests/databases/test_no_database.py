"""``manage.py check`` with settings that name no usable database says so, or nothing; it does not fail itself."""

from __future__ import annotations

import subprocess
import sys

import django
import pytest
from django.db import connections

from django_mysqlqueue.checks import system as checks
from tests.support.internals import databases

CHECK = """
import django
from django.conf import settings
from django.core.management import call_command

settings.configure(
    DATABASES={databases!r},
    MYSQLQUEUE={queue!r},
    SECRET_KEY="s",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_mysqlqueue"],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()
call_command("check", tags={tags!r})
"""
STATIC = ["django_mysqlqueue"] if django.VERSION >= (6, 1) else None
"""From 6.1 on, Django's own checks of models ask each database for its features, and fail."""
DATABASES = ["django_mysqlqueue", "database"]
NAMELESS = {"ENGINE": "django.db.backends.sqlite3"}
SECOND = {"TOPICS": {"a": {"DATABASE": "second"}}}


def check(given, queue, tags):
    code = CHECK.format(databases=given, queue=queue, tags=tags)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("given", "queue"),
    [
        ({}, {}),
        ({"default": NAMELESS}, {}),
        ({"default": {}, "second": {}}, SECOND),
        ({"default": NAMELESS, "second": {"ENGINE": "django.db.backends.sqlite3", "NAME": "x"}}, SECOND),
        ({"default": NAMELESS, "second": NAMELESS}, SECOND),
    ],
)
def test_check_does_not_fail(given, queue):
    done = check(given, queue, STATIC)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "E024" not in done.stderr, "nothing is known of databases without a name"
    assert ("W010" in done.stderr) == (NAMELESS in given.values())


@pytest.mark.skipif(django.VERSION < (6, 1), reason="no database is checked there without its alias")
@pytest.mark.parametrize("given", [{}, {"default": NAMELESS}])
def test_a_check_of_databases_names_the_one_that_cannot_be_used(given):
    done = check(given, {}, DATABASES)
    assert "SystemCheckError" in done.stderr
    assert "django_mysqlqueue.E011" in done.stderr


@pytest.fixture
def asked(monkeypatch, settings):
    """The aliases whose backends were asked for the driver's arguments: some fetch a password or token then."""
    found = []
    for alias in ("default", "queue"):
        original = connections[alias].get_connection_params

        def get(alias=alias, original=original):
            found.append(alias)
            return original()

        monkeypatch.setattr(connections[alias], "get_connection_params", get)
    return found


def test_a_backend_is_asked_only_if_there_are_several(asked, settings):
    assert checks.check_databases() == []
    assert asked == []
    settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": "queue"}}}
    assert checks.check_databases() == []
    assert sorted(asked) == ["default", "queue"], "once each"


def test_a_backend_that_cannot_tell_is_known_by_its_settings(monkeypatch, settings):
    def fail():
        raise OSError("no token")

    settings.MYSQLQUEUE = {"TOPICS": {"a": {"DATABASE": "queue"}}}
    for alias in ("default", "queue"):
        monkeypatch.setattr(connections[alias], "get_connection_params", fail)
        monkeypatch.setitem(connections[alias].settings_dict, "NAME", alias)
    assert databases.same_databases() is None
    monkeypatch.setitem(connections["queue"].settings_dict, "NAME", "default")
    assert databases.same_databases() == ("default", "queue")
