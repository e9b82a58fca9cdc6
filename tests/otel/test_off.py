"""Tracing costs nothing to who does not use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, otel, publish, publish_many
from tests.support.harness import Sub, handler
from tests.support.internals import observers, publish_hooks
from tests.support.paths import ROOT
from tests.support.still_time import Time


def test_tracing_costs_no_statement(traced, monkeypatch):
    Time(monkeypatch)  # Nothing becomes due, however slow the machine is.

    def cost():
        sub = Sub(handler())
        sub.step()  # By what it looks for work at its start depends on the server's statistics (``last_offsets``).
        with CaptureQueriesContext(connection) as captured:
            publish("t", 1, key="k")  # without one it is chance how many partitions there are
            publish_many("t", [Message(number, key="k") for number in range(10)])
        with CaptureQueriesContext(connection) as also:
            sub.step()
            assert sub.work() == 11
            sub.flush()
        sub.leave()
        return len(captured), len(also)

    cost()
    on = cost()
    assert traced.spans()
    otel.uninstrument()
    count = len(traced.spans())
    assert cost() == on
    assert len(traced.spans()) == count
    assert publish_hooks.trace is None
    assert observers.trace is None


EVERYTHING = """
import importlib, pkgutil, sys

name, blocked = sys.argv[1], sys.argv[2] == "blocked"
if blocked:
    sys.modules[name] = None  # an import fails
import django
django.setup()
from django.core.management import load_command_class
from django_mysqlqueue import inspection, management, operations, runtime, service, testing
for package in (service, operations, inspection, runtime, management):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for command in pkgutil.iter_modules([management.__path__[0] + "/commands"]):
    load_command_class("django_mysqlqueue", command.name)
assert blocked or name not in sys.modules, "imported unasked"
"""


@pytest.mark.any_engine
@pytest.mark.any_version
@pytest.mark.parametrize("how", ["blocked", "there"])
@pytest.mark.parametrize("name", ["opentelemetry", "prometheus_client", "health_check"])
def test_nothing_of_an_extra_is_imported_unasked(name, how, tmp_path):
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "TEST_SQLITE_FILE": str(tmp_path / "x.sqlite3")}
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING, name, how], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_set_up_of_the_guide(tmp_path):
    """As the page has it, with the SDK's exporter to the console in place of the one that needs a collector."""
    (block,) = re.findall(r"```python\n([^`]*OTLPSpanExporter[^`]*)```", (ROOT / "docs/howto/observe.md").read_text())
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    otlp = "from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter\n"
    assert otlp in block
    console = "from opentelemetry.sdk.trace.export import ConsoleSpanExporter as OTLPSpanExporter\n"
    (package / "apps.py").write_text(block.replace(otlp, console))
    code = """
import tests.settings
tests.settings.INSTALLED_APPS.append("shop")
import django
django.setup()
from django.core.management import call_command
from django_mysqlqueue import publish
call_command("migrate", verbosity=0)
publish("orders", 1)
"""
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "TEST_SQLITE_FILE": str(tmp_path / "x.sqlite3"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    env.pop("DATABASE_URL", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"name": "send orders"' in done.stdout
