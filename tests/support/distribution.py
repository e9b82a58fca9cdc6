"""What the packaging tests share: a copy of the project as a clone would be, and what is built from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEFT_OUT = (
    ".git",
    ".test",
    ".venv",
    ".*_cache",
    ".hypothesis",
    ".coverage*",
    "build",
    "dist",
    "demo-output",
    "htmlcov",
    "*.egg-info",
    "*.py[cod]",
    "*.sqlite3*",
    "__pycache__",
)
"""What .gitignore names, and Git's own: stale files of an earlier build would get into the wheel."""


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path
    project: dict[str, Any]
    """The table ``project`` of its pyproject.toml."""

    @property
    def release(self) -> str:
        return f"{self.project['name'].replace('-', '_')}-{self.project['version']}"

    def names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def read(self, name: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(f"{self.release}.dist-info/{name}").decode()

    def metadata(self) -> Message:
        return Parser().parsestr(self.read("METADATA"))


def build(project: Path, out: Path) -> Built:
    done = subprocess.run([sys.executable, "-m", "build", "-o", out, project], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return Built(wheel, sdist, tomllib.loads((project / "pyproject.toml").read_text())["project"])


def copy_project(folder: Path) -> Path:
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return folder
