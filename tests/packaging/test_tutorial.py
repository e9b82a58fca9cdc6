"""The tutorial works as it is printed: with the built wheel, in a virtual environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.consoles import Command, commands, pattern
from tests.support.distribution import ROOT, copy_project

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]

TUTORIAL = ROOT / "docs" / "tutorial.md"
END = "--- end of command"


@dataclass(frozen=True)
class FileBlock:
    """A file to write (``all of it``, ``a new file``) or to add to (``at the end``)."""

    path: str
    text: str
    append: bool


def blocks(page: str) -> Iterator[FileBlock | list[Command]]:
    """The fenced blocks of the page in their order; a file's name stands in the line above its block."""
    place = re.compile(r"^`([^`]+)`, (a new file|all of it|at the end):$")
    for found in re.finditer(r"^([^\n]*)\n\n?^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        above, language, text = found.groups()
        named = place.match(above)
        if named:
            yield FileBlock(named[1], text, append=named[2] == "at the end")
        elif language == "console":
            yield commands(text)
        else:
            raise AssertionError(f"a block of {language} that is neither a file nor commands: {text}")


class Shell:
    """One bash for the whole page: its folder and its virtual environment stay from block to block."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f'{{ {command}}} < /dev/null\necho "{END} $?"\n')
        self._process.stdin.flush()
        output = ""
        for line in self._process.stdout:
            if line.startswith(END):
                return output, int(line.removeprefix(END))
            output += line
        raise AssertionError(f"the shell ended:\n{output}")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a checkout, where ``python3`` is the interpreter under test."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE", "COV_", "DJANGO_"))}
    env = keep | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PYTHONUNBUFFERED": "1",
    }
    env.pop("DATABASE_URL", None)
    shell = Shell(copy_project(tmp_path / "django-mysqlqueue"), env)
    yield shell
    shell.close()


def test_the_tutorial_as_printed(shell: Shell, tmp_path: Path) -> None:
    ran = 0
    for block in blocks(TUTORIAL.read_text()):
        if isinstance(block, FileBlock):
            file = tmp_path / "bookshop" / block.path
            before = file.read_text() + "\n\n" if block.append else ""
            file.write_text(before + block.text)
            continue
        for command in block:
            # Of Django's commands and ours a warning is an error; pip has some of its own.
            if command.text.startswith("python manage.py"):
                shell.run("export PYTHONWARNINGS=error\n")
            output, code = shell.run(command.text)
            assert code == 0, f"$ {command.text}{output}"
            if command.output is not None:
                matches = bool(pattern(command.output).fullmatch(output))
                assert matches, f"$ {command.text}{output}\nexpected:\n{command.output}"
            ran += 1
    assert ran > 15


def test_expected_output_is_compared() -> None:
    """The comparison above can fail."""
    assert pattern("a … c\n…\nend\n").fullmatch("a b c\nx\ny\nend\n")
    assert pattern("a\n…\nend\n").fullmatch("a\nend\n")
    assert not pattern("a … c\nend\n").fullmatch("a b d\nend\n")
    assert not pattern("a\n").fullmatch("a\nb\n")
    first, second = commands("$ one \\\n> two\nout\n$ three\n")
    assert first == Command("one \\\ntwo\n", "out\n")
    assert second == Command("three\n", None)
