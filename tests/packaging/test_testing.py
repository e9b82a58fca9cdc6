"""``django_mysqlqueue.testing`` in a project's own test runs: Django's runner and pytest, each in a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from tests.support.paths import ROOT


def run(*command: str, isolation: str = "read committed") -> str:
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.user_project.settings", "TEST_ISOLATION": isolation}
    if env.get("DATABASE_URL"):
        parts = urlsplit(env["DATABASE_URL"])
        env["DATABASE_URL"] = parts._replace(path=f"{parts.path}_shop").geturl()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_djangos_runner(isolation):
    """Twice on servers: inside a TestCase the queue cannot bring its own isolation level."""
    if isolation == "repeatable read" and not os.environ.get("DATABASE_URL"):
        pytest.skip("SQLite has no isolation levels")
    output = run("django", "test", "tests.user_project", "--noinput", isolation=isolation)
    found = re.search(r"Ran (\d+) tests", output)
    assert found is not None
    assert int(found[1]) > 25


def test_the_pytest_fixture(tmp_path):
    """Away from this suite's conftest.py; that the fixture is found shows the entry point."""
    shutil.copy(ROOT / "tests" / "user_project" / "shop" / "check_fixture.py", tmp_path / "test_fixture.py")
    output = run("pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path))
    assert "4 passed" in output


@pytest.mark.any_engine
@pytest.mark.any_version
def test_importing_the_plugin_needs_neither_settings_nor_django():
    code = "import sys, django_mysqlqueue.pytest_plugin; assert 'django' not in sys.modules"
    env = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)
