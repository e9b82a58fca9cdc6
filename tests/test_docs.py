"""The documents are right: their code compiles, and what they name exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command, get_commands, load_command_class

import django_mysqlqueue
from django_mysqlqueue import conf, publish
from django_mysqlqueue.admin.formatting import SHOWN_CHARACTERS, redacted
from django_mysqlqueue.admin.operations.base import IdsField
from django_mysqlqueue.admin.pages.base import PAGE_ROWS
from django_mysqlqueue.admin.pages.subscribers import SHOWN_IN_FLIGHT
from django_mysqlqueue.inspection import bounds
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.refs import GroupRef
from tests.support.harness import USING, Sub, handler, lag, sequence

pytestmark = pytest.mark.any_engine

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))])
COMMANDS = ROOT / "django_mysqlqueue" / "management" / "commands"

OTHERS_COMMANDS = {"qcluster"}
"""Of the packages that the guides move over from."""


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each fenced block in one of the languages, dedented."""
    text = page.read_text()
    for found in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        if found[2] in languages:
            yield text[: found.start()].count("\n") + 2, textwrap.dedent(found[3])


def parsed(*only: Path) -> Iterator[tuple[str, ast.Module]]:
    """(where, tree) of every Python block."""
    for page in only or PAGES:
        for line, text in blocks(page, "python"):
            yield f"{page.relative_to(ROOT)}:{line}", ast.parse(text, str(page))


def identify(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- code ---------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_python_compiles(page):
    for line, text in blocks(page, "python"):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile("\n" * (line - 1) + text, str(page), "exec", flags=flags, dont_inherit=True)


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        if module and hasattr(importlib.import_module(module), attribute):
            return True
        return bool(importlib.import_module(name))
    except ModuleNotFoundError:
        return False


def test_what_is_imported_from_the_package_exists():
    seen = 0
    for where, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "django_mysqlqueue":
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    assert _exists(name), (where, name)
                    seen += 1
    assert seen > 20


def test_arguments_of_the_api_exist():
    known = {
        name: set(inspect.signature(getattr(django_mysqlqueue, name)).parameters)
        for name in ("publish", "publish_many", "cancel", "reschedule", "subscriber", "Message", "Backoff")
    }
    methods = {
        name: set(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(django_mysqlqueue.Delivery, inspect.isfunction)
    }
    seen = 0
    for where, tree in parsed():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in known:
                allowed = known[node.func.id]
            elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "delivery":
                assert node.func.attr in methods, (where, node.func.attr)
                allowed = methods[node.func.attr]
            else:
                continue
            seen += 1
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert given <= allowed, (where, given - allowed)
    assert seen > 30


def test_attributes_of_a_delivery_exist(db):
    held: list[Any] = []
    publish("t", 1)
    Sub(handler(function=held.append)).settle()
    for where, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "delivery":
                assert hasattr(held[0], node.attr), (where, node.attr)


def test_settings_in_examples_are_valid(settings):
    seen = 0
    for where, tree in parsed():
        for node in ast.walk(tree):
            assigned = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MYSQLQUEUE"
            if not assigned and not (isinstance(node, ast.keyword) and node.arg == "MYSQLQUEUE"):
                continue
            given = eval(ast.unparse(node.value))  # noqa: S307
            settings.MYSQLQUEUE = dict(given)
            assert not conf.problems(), where
            seen += 1
    assert seen > 4


def _block(page: str, containing: str) -> str:
    (found,) = [text for _, text in blocks(DOCS / page, "python") if containing in text]
    return found


def test_the_json_formatter_works():
    namespace: dict[str, Any] = {}
    exec(_block("howto/observe.md", "class JSONFormatter"), namespace)  # noqa: S102
    formatter = namespace["JSONFormatter"]()
    record = logging.LogRecord("django_mysqlqueue.subscriber", logging.WARNING, "", 1, "%s %s", ("a", "b"), None)
    assert json.loads(formatter.format(record))["message"] == "a b"
    record.mysqlqueue = {"event": "delivery.failed", "group": "g", "error": ValueError("x")}
    try:
        raise ValueError("x")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = json.loads(formatter.format(record))
    assert line["event"] == "delivery.failed"
    assert line["error"] == "x"
    assert line["traceback"].endswith("ValueError: x")
    assert "stacks" not in line
    record.stack_info = "Thread MainThread:\n  …"
    assert json.loads(formatter.format(record))["stacks"] == record.stack_info


def test_the_logging_settings_make_json_of_events(tmp_path):
    """In a process of its own: dictConfig closes the handlers that pytest has set up."""
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "logs.py").write_text(_block("howto/observe.md", "class JSONFormatter"))
    (package / "settings.py").write_text(_block("howto/observe.md", '"shop.logs.JSONFormatter"'))
    code = (
        "import logging.config; from shop.settings import LOGGING; logging.config.dictConfig(LOGGING); "
        "from django_mysqlqueue.runtime.log import event; event(logging.ERROR, 'delivery.dead_lettered', group='g')"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    line = json.loads(done.stderr)
    assert (line["event"], line["level"], line["group"]) == ("delivery.dead_lettered", "ERROR", "g")


def _commands_on_failures() -> list[list[str]]:
    return [
        shlex.split(line)[2:]
        for _, block in blocks(DOCS / "howto" / "failures.md", "sh")
        for line in block.splitlines()
        if "manage.py" in line
    ]


@pytest.mark.parametrize("way", ["command", "python"])
def test_a_message_is_given_up_as_the_page_says(db, way):
    publish("orders", 1)
    sequence()
    QueueMessage.objects.update(offset=4711, message_id="0194f0c1-7d3a-7bb1-9c55-2f6f0f0a8e21")
    Sub(handler("orders", "billing", lambda delivery: delivery.nack(3600, "no such order"))).settle()
    if way == "command":
        (command,) = [one for one in _commands_on_failures() if one[0] == "queuedeadletter"]
        call_command(*command, "--noinput", stdout=io.StringIO())
    else:
        exec(_block("howto/failures.md", "operations.dead_letter("), {})  # noqa: S102
    sequence()
    letter = QueueMessage.objects.get(topic="orders_dlq")
    assert letter.original_offset == 4711
    assert letter.last_error.startswith("no such order\nDead-lettered by ")
    assert letter.last_error.endswith(": order was deleted")


def test_a_dead_letter_is_given_back_as_the_page_says(db):
    def fail(delivery):
        raise ValueError("broken")

    publish("orders", {"order": 7}, key="1", id="seven", metadata={"from": "web"})
    sub = Sub(handler("orders", "billing", fail, max_attempts=1), handler("orders", "mail"))
    sub.settle()
    sub.leave()
    commands = [one for one in _commands_on_failures() if one[0] != "queuedeadletter"]
    assert [name for name, *_ in commands[:3]] == ["queueredrive", "queueredrive", "queuediscard"]
    for command in commands[:2]:
        call_command(*command, "--noinput", stdout=io.StringIO())
    with pytest.raises(CommandError, match="No dead letter of orders_dlq matches"):  # they have been redriven
        call_command(*commands[2], "--noinput", stdout=io.StringIO())
    got: list[Any] = []
    Sub(handler("orders", "billing", got.append), handler("orders", "mail", got.append)).settle()
    assert [(one.group, one.id, one.payload, one.metadata["from"]) for one in got] == [
        ("billing", "seven", {"order": 7}, "web")
    ]
    assert not QueueMessage.objects.filter(topic="orders_dlq").exists()
    for command in commands[3:]:
        call_command(*command, "--noinput", stdout=io.StringIO())
    assert lag("billing", "orders") == 2  # both come again


def test_acked_dead_letters_are_collected_as_the_page_says(settings):
    """``howto/failures.md``: a handler of a DLQ topic makes RETENTION count."""
    settings.MYSQLQUEUE = {"RETENTION": 60}
    assert conf.get_settings().retention_of("orders_dlq", has_groups=True) == 60
    assert conf.get_settings().retention_of("orders_dlq", has_groups=False) is None
    settings.MYSQLQUEUE = {"TOPICS": {"orders_dlq": {"RETENTION": None}}}
    assert conf.get_settings().retention_of("orders_dlq", has_groups=True) is None


# -- the dashboard ------------------------------------------------------------

DASHBOARD = DOCS / "howto" / "dashboard.md"


def _example(page: Path, name: str) -> dict[str, Any]:
    """What the Python block of a page defines in which a name is defined."""
    (text,) = [text for _, text in blocks(page, "python") if re.search(rf"^def {name}\(", text, re.MULTILINE)]
    found: dict[str, Any] = {}
    exec(text, found)  # noqa: S102
    return found


def test_the_page_on_the_dashboard_redacts(settings):
    hook = _example(DASHBOARD, "redact")["redact"]
    settings.MYSQLQUEUE = {"REDACT": hook}
    assert conf.problems() == []
    shown = {
        (topic, kind): redacted("Ada <ada@example.com>", topic=topic, kind=kind)
        for topic in ("orders", "payments", "payments_dlq")
        for kind in ("payload", "metadata", "error")
    }
    hidden = {place for place, text in shown.items() if text == "(hidden)"}
    assert hidden == {(topic, kind) for topic in ("payments", "payments_dlq") for kind in ("payload", "metadata")}
    assert {text for place, text in shown.items() if place not in hidden} == {"Ada <(address)>"}


def test_the_page_on_the_dashboard_gives_permissions(db):
    _example(DASHBOARD, "make_operators")["make_operators"]()
    user = User.objects.create_user("ada", is_staff=True)
    user.groups.set(Group.objects.filter(name="queue operators"))
    assert user.get_all_permissions() == {
        f"django_mysqlqueue.{name}" for name in ("view_dashboard", "operate_dashboard", "view_operation")
    }


def test_the_page_on_the_dashboard_has_every_problem():
    """Its tables begin with the words of the problem, and its times are the thresholds."""
    text = DASHBOARD.read_text()
    listed = re.findall(r"^\| \*([^*|]+)\* \|", text, re.MULTILINE)
    source = (ROOT / "django_mysqlqueue" / "inspection" / "problems.py").read_text()
    texts = re.findall(r'\b(?:_|ngettext)\(\s*"([^"]+)"', source)
    kinds = set(re.findall(r'(?:yield|return) Problem\([^"]*"(\w+)"', source))
    assert len(listed) == len(set(listed)) == len(kinds) > 9
    for words in listed:
        parts = [re.escape(part.strip()) for part in words.split("…")]
        assert any(re.search(".*".join(parts), re.sub(r"%\(\w+\)s", "…", one)) for one in texts), words
    times = bounds.STALL_TIMES
    assert (times.outbox, times.stuck, times.still, times.transaction) == (15, 60, 600, 300)  # as the tables say


def test_the_page_on_the_dashboard_has_the_bounds():
    text = DASHBOARD.read_text()
    assert f"Counts stop at {bounds.PAGES.count:,}, of a partition's lag at {bounds.PAGES.partition_count:,}," in text
    assert f"more than {bounds.PAGES.partitions:,} partitions" in text
    assert f"may take {bounds.PAGES.seconds} s" in text
    assert f"the {bounds.PAGES.heads} of each group" in text
    assert f"come in pages of {PAGE_ROWS}" in text
    assert f"more than {bounds.PAGES.merged_partitions} partitions is browsed {bounds.PAGES.walked:,} places" in text
    assert f"newest {bounds.PAGES.recorded} records of it and at most {bounds.PAGES.message_groups} groups" in text
    assert f"the first {bounds.PAGES.dead_letters:,} of a topic by partition key" in text
    assert f"searches the text of {bounds.PAGES.errors:,} errors" in text
    assert f"at most {IdsField.most:,} dead letters" in text
    assert f"the {SHOWN_IN_FLIGHT} deliveries" in text
    assert f"no longer than {SHOWN_CHARACTERS:,} bytes" in text


# -- other formats ------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_other_blocks_are_well_formed(page):
    for _, text in blocks(page, "yaml"):
        yaml.safe_load(text)
    for _, text in blocks(page, "json"):
        json.loads(text)
    for _, text in blocks(page, "toml"):
        tomllib.loads(text)
    for line, text in blocks(page, "sh"):
        done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, (page, line, done.stderr)


def test_grace_periods_are_long_enough():
    """The process takes up to SHUTDOWN_TIMEOUT and 7 s to leave."""
    from django_mysqlqueue.runtime.process.subscriber import RELEASE_TIMEOUT, SHUTDOWN_MARGIN

    least = conf.Settings().shutdown_timeout + SHUTDOWN_MARGIN + RELEASE_TIMEOUT
    page = DOCS / "howto" / "deploy.md"
    text = page.read_text()
    found = [
        re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE),
        re.search(r"^ *stop_grace_period: (\d+)s$", text, re.MULTILINE),
        re.search(r"^ *terminationGracePeriodSeconds: (\d+)$", text, re.MULTILINE),
    ]
    for number in found:
        assert number is not None
        assert int(number[1]) > least


# -- commands -----------------------------------------------------------------


def _command(name: str) -> Any:
    return load_command_class(get_commands()[name], name)


def _options(name: str) -> set[str]:
    parser = _command(name).create_parser("manage.py", name)
    return {option for action in parser._actions for option in action.option_strings}


def test_commands_and_their_options_exist():
    seen = set()
    for page in PAGES:
        text = page.read_text()
        # A command in a list of arguments (YAML, a Dockerfile) or in words.
        for found in re.finditer(r"manage\.py(?:\"?, ?\"|\s+)([a-z]\w+)([^`\n]*)", text):
            name, rest = found[1], found[2]
            if name in OTHERS_COMMANDS:
                continue
            assert name in get_commands(), (page, found[0])
            allowed = _options(name)
            # What follows a further command of the shell is not the command's.
            options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.split(r"[;|&#]", rest)[0]))
            assert options <= allowed, (page, found[0], options - allowed)
            seen.add(name)
    assert {"runsubscriber", "queuestatus", "queuedropgroup", "queuegroupmode"} <= seen


def _lists(value: Any) -> Iterator[list[Any]]:
    """Every list in a YAML document, at any depth."""
    if isinstance(value, list):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _lists(item)


def test_commands_of_containers_exist():
    seen = 0
    for page in PAGES:
        for _, text in blocks(page, "yaml"):
            for words in _lists(yaml.safe_load(text)):
                if "manage.py" not in words:
                    continue
                name, *rest = words[words.index("manage.py") + 1 :]
                options = {word.partition("=")[0] for word in rest if word.startswith("--")}
                allowed = _options(name)
                assert options <= allowed, (page, words)
                seen += 1
    assert seen == 3


def test_options_in_words_exist():
    """``--something`` between backticks is an option of one of the queue's commands."""
    known = {option for file in COMMANDS.glob("q*.py") for option in _options(file.stem)}
    known |= _options("runsubscriber")
    pipeline = COMMANDS.parents[1] / "pipeline" / "cli.py"
    known |= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', pipeline.read_text()))
    others = {"--help", "--cov", "--exclude"}
    for page in [*DOCS.glob("howto/*.md"), *DOCS.glob("reference/*.md"), *DOCS.glob("explanation/*.md")]:
        for code in re.findall(r"`(--[^`]+)`", page.read_text()):
            options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code))
            assert options <= known | others, (page, options - known)


def test_every_command_and_option_is_in_the_reference():
    page = (DOCS / "reference" / "commands.md").read_text()
    inherited = _options("check") | {"--database", "--skip-checks"}
    for file in COMMANDS.glob("[a-z]*.py"):
        assert file.stem in page, file.stem
        missing = {
            option
            for option in _options(file.stem) - inherited
            if option.startswith("--") and option not in page and option != "--no-input"
        }
        assert not missing, (file.stem, missing)


# -- what the reference lists -------------------------------------------------


def test_every_setting_is_in_the_reference():
    page = (DOCS / "reference" / "settings.md").read_text()
    listed = dict(re.findall(r"^\| `([A-Z_]+)` \| (.+?) \|", page, re.MULTILINE))
    defaults = conf.Settings()
    known = {name.upper() for name in (*conf._FIELDS, *conf._MONITORING)} | {"TOPICS", "GROUPS"}
    assert set(listed) == known
    for name, shown in listed.items():
        value, default = ast.literal_eval(shown.strip("`")), getattr(defaults, name.lower())
        if name == "BACKOFF":
            value = conf.parse_backoff(value)
        elif name == "HEALTH":
            value = conf._health(value)
        assert value == default, name


def test_every_check_is_in_the_reference():
    page = (DOCS / "reference" / "checks.md").read_text()
    package = ROOT / "django_mysqlqueue"
    source = (package / "checks.py").read_text() + (package / "conf.py").read_text()
    raised = set(re.findall(r"\b([EW]\d{3})\"", source))
    assert set(re.findall(r"`django_mysqlqueue\.([EW]\d{3})`", page)) == raised
    assert len(raised) > 8


def test_every_event_is_in_the_reference():
    page = (DOCS / "reference" / "log.md").read_text()
    listed = dict(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| ([A-Z]+) \|", page, re.MULTILINE))
    logged: dict[str, set[str]] = {}
    for file in (ROOT / "django_mysqlqueue").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "event":
                levels = set(re.findall(r"logging\.([A-Z]+)", ast.unparse(node.args[0])))
                for constant in ast.walk(node.args[1]):
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                        logged.setdefault(constant.value, set()).update(levels)
    assert set(listed) == set(logged)
    for name, level in listed.items():
        assert level in logged[name], name


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
