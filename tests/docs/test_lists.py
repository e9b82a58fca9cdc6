"""Lists in the reference are complete."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from django.core.management import call_command

import django_mysqlqueue
from django_mysqlqueue import publish
from django_mysqlqueue.options import conf, validators
from tests.conftest import QUEUE_MODELS
from tests.support.documents import DOCS, PAGES, _block
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, groups
from tests.support.paths import ROOT

pytestmark = pytest.mark.any_engine


def test_every_setting_is_in_the_reference():
    page = (DOCS / "reference" / "settings.md").read_text()
    listed = dict(re.findall(r"^### `([A-Z_]+)`\n\n- Type: .+\n- Default: `(.+)`$", page, re.MULTILINE))
    defaults = conf.Settings()
    known = {name.upper() for name in (*conf._FIELDS, *conf._MONITORING)} | {"TOPICS", "GROUPS"}
    assert set(listed) == known
    for name, shown in listed.items():
        value, default = ast.literal_eval(shown), getattr(defaults, name.lower())
        if name == "BACKOFF":
            value = validators.backoff(value)
        elif name == "HEALTH":
            value = conf._parsed(conf.HealthSettings, value)
        elif name == "BELL":
            value = conf._bell(value)
        assert value == default, name


@pytest.mark.parametrize("model", QUEUE_MODELS, ids=lambda model: model._meta.db_table)
def test_every_column_is_in_the_reference(model):
    sections = (DOCS / "tables.md").read_text().split("\n### ")
    (section,) = [text for text in sections if text.startswith(f"{model._meta.db_table}\n")]
    columns = {
        column.column for column in model._meta.local_concrete_fields if not column.column.startswith("latency_")
    }
    assert set(re.findall(r"`([a-z_]+)`", section)) >= columns


def test_every_check_is_in_the_reference():
    page = (DOCS / "reference" / "checks.md").read_text()
    package = ROOT / "django_mysqlqueue"
    modules = ("checks/system.py", "checks/schedules.py", "options/conf.py", "tasks/backend.py")
    source = "".join((package / module).read_text() for module in modules)
    raised = set(re.findall(r"\b([EW]\d{3})\"", source))
    assert set(re.findall(r"`django_mysqlqueue\.([EW]\d{3})`", page)) == raised
    assert len(raised) > 8


def test_every_event_is_in_the_reference():
    page = (DOCS / "reference" / "log.md").read_text()
    listed = {
        name: (level, set(re.findall(r"`([a-z_]+)`", keys)))
        for name, level, keys in re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| ([A-Z]+) \|(.*?)\|", page, re.MULTILINE)
    }
    logged: dict[str, tuple[set[str], set[str]]] = {}
    for file in (ROOT / "django_mysqlqueue").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for name, levels, keys in _events(node):
                known_levels, known_keys = logged.setdefault(name, (set(), set()))
                known_levels |= levels
                known_keys |= keys
    assert set(listed) == set(logged)
    for name, (level, keys) in listed.items():
        assert level in logged[name][0], name
        assert keys == logged[name][1], name


def _events(node: ast.AST) -> Iterator[tuple[str, set[str], set[str]]]:
    """The events of a call that logs: name, levels, keys."""
    match node:
        case ast.Call(func=ast.Name(id="event" | "failing"), args=[level, verb]):
            levels = set(re.findall(r"logging\.([A-Z]+)", ast.unparse(level)))
            keys = {key for keyword in node.keywords for key in _keys(keyword)} - {"exc_info", "stacks", "to"}
            for constant in ast.walk(verb):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield constant.value, levels, keys
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="logger"), attr=level), args=[ast.Constant(value=str(text)), *_]
        ):
            yield text.split()[0], {level.upper()}, set(re.findall(r"(\w+)=%", text))


def _keys(keyword: ast.keyword) -> set[str]:
    """The keys of an argument of ``event``; of ``**fields``, those of the function or the dicts that make them."""
    if keyword.arg is not None:
        return {keyword.arg}
    made_by = {getattr(one.func, "id", "") for one in ast.walk(keyword.value) if isinstance(one, ast.Call)}
    delivery = {"group", "topic", "partition", "offset", "attempt"}
    if "_fields" in made_by:
        return delivery | {"messages"}
    if "delivery_fields" in made_by:
        return delivery
    dicts = [one for one in ast.walk(keyword.value) if isinstance(one, ast.Dict)]
    return {key.value for one in dicts for key in one.keys if isinstance(key, ast.Constant)}


@pytest.mark.parametrize("name", ["publish", "publish_many", "subscriber"])
def test_every_argument_is_in_the_docstring_that_the_reference_shows(name):
    function = getattr(django_mysqlqueue, name)
    described = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(function) or "", re.MULTILINE))
    assert set(inspect.signature(function).parameters) <= described


def test_fields_of_the_status_exist(db):
    page = (DOCS / "howto" / "observe.md").read_text()
    table = page.split("## Numbers")[1].split("```")[0]
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    publish("t", 1)
    output = io.StringIO()
    call_command("queuestatus", format="json", stdout=output)
    found = json.loads(output.getvalue())
    known = {*found, *found["groups"][0], *found["topics"][0], *found["problems"][0]}
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert named <= known, named - known
    assert len(named) > 6


def test_the_examples_of_inspection_run(db, clock, capsys):
    """The group is a hundred seconds late, and one message is a dead letter."""
    sub = Sub(handler("orders", "billing", lambda delivery: delivery.reject("no")))
    publish("orders", 1)
    sub.settle()
    publish("orders", 2)
    sequence()
    clock.advance(100)
    exec(_block("reference/inspection.md", 'list_dead_letters("orders"'), {})  # noqa: S102
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "lag 1, 0 live subscribers"
    assert others[0].startswith("No live subscribers for billing/orders")
    assert others[-1].endswith("['no']")
    found: dict[str, Any] = {}
    exec(_block("howto/observe.md", "def groups_that_are_late"), found)  # noqa: S102
    assert found["groups_that_are_late"](60) == ["billing"]
    assert found["groups_that_are_late"](1000) == []


def test_relative_links_lead_somewhere():
    """Sphinx sees those of docs/ alone."""
    for page in PAGES:
        words = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", words):
            assert (page.parent / target).exists(), (page, target)


def test_files_for_the_repository_host_are_yaml():
    for file in [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"]:
        assert yaml.safe_load(file.read_text()), file
