"""What the package needs to be imported."""

from __future__ import annotations

import os
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


@pytest.mark.any_engine
def test_the_command_line_of_the_pipeline_starts_without_spark():
    """``archive status`` answers at once: PySpark takes a second to import."""
    code = "import sys, pyspark_mysqlqueue.cli; assert 'pyspark' not in sys.modules; pyspark_mysqlqueue.DefaultSource"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT / "spark", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


UNUSED = (
    "django_mysqlqueue.admin.operations",
    "django_mysqlqueue.admin.pages",
    "django_mysqlqueue.health",
    "django_mysqlqueue.inspection.overview",
    "django_mysqlqueue.inspection.problem",
    "django_mysqlqueue.metrics",
    "django_mysqlqueue.operations",
    "django_mysqlqueue.otel",
    "django_mysqlqueue.procedures.installing",
    "django_mysqlqueue.runtime.process.supervisor",
    "django_mysqlqueue.subscriptions.effective",
    "django_mysqlqueue.testing",
    "pyspark_mysqlqueue",
    "tqdm",
)
"""What a subscriber of a project with the dashboard, jobs and tails does not use."""


@pytest.mark.any_engine
def test_a_subscriber_imports_only_what_it_uses(tmp_path):
    code = (
        "import sys; from django.core.management import execute_from_command_line as run; "
        "run(['manage.py', 'runsubscriber', '--drain']); "
        "assert 'django_mysqlqueue.admin.dashboard' in sys.modules; "
        f"sys.exit('used: ' + ', '.join(name for name in {UNUSED!r} if name in sys.modules))"
    )
    settings = {
        "DATABASE_URL": f"sqlite:///{tmp_path / 'queue.sqlite3'}",
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
    }
    env = {**os.environ, **settings}
    # In a process of its own: the checks of databases, which it runs, read the options of groups.
    subprocess.run([sys.executable, "manage.py", "migrate", "--verbosity", "0"], cwd=ROOT, env=env, check=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "used: ", done.stderr


@pytest.mark.any_engine
def test_planning_a_query_in_spark_needs_no_arrow():
    """Each plan is made in a new process, which would import it."""
    pytest.importorskip("pyspark")
    code = "import sys; from pyspark_mysqlqueue import pushdown; assert 'pyarrow' not in sys.modules"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
