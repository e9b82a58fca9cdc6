"""Commands and options in the documents exist, and all are documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from django.core.management import get_commands, load_command_class

from tests.support.documents import COMMANDS, DOCS, PAGES, blocks
from tests.support.paths import ROOT

pytestmark = pytest.mark.any_engine

OTHERS_COMMANDS = {"db_worker", "dj_queue", "ox_worker", "qcluster", "steady_queue"}
"""Of the packages that the guides move over from."""


def _command(name: str) -> Any:
    return load_command_class(get_commands()[name], name)


def _options(name: str) -> set[str]:
    parser = _command(name).create_parser("manage.py", name)
    return {option for action in parser._actions for option in action.option_strings}


def test_commands_and_their_options_exist():
    seen = set()
    for page in (*PAGES, *DOCS.glob("monitoring/*.yml")):
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
    pipeline = ROOT / "spark" / "pyspark_mysqlqueue" / "cli.py"
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
