"""What the package needs to be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.any_engine
def test_the_app_works_without_the_admin(tmp_path):
    """Nothing/the package imports contrib.admin by itself."""
    code = (
        "import django, sys; from django.conf import settings; "
        "settings.configure(INSTALLED_APPS=['django_mysqlqueue'], "
        "TEMPLATES=[{'BACKEND': 'django.template.backends.django.DjangoTemplates', 'APP_DIRS': True}], "
        "DATABASES={'default': "
        "{'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:', 'OPTIONS': {'transaction_mode': 'IMMEDIATE', "
        "'timeout': 30, 'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;'}}}); "
        "django.setup(); from django.core.management import call_command; call_command('check'); "
        "call_command('migrate', verbosity=0); from django_mysqlqueue import publish; publish('t', 1); "
        "call_command('queuestatus'); assert 'django.contrib.admin' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no issues" in done.stdout


@pytest.mark.any_engine
def test_importing_the_package_needs_no_settings():
    code = (
        "import sys, django_mysqlqueue; assert 'django' not in sys.modules; assert 'publish' in dir(django_mysqlqueue)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
