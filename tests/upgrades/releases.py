"""The package as a git revision has it: the last release, or HEAD before 1.0."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def last_release() -> str | None:
    """The tag of the last release before HEAD, from 1.0 on; None: there is none yet, or this is not a clone."""
    try:
        return git("describe", "--tags", "--match", "v[1-9]*", "--abbrev=0", "HEAD^").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def chosen() -> str:
    """The revision that today's code must get along with. ``UPGRADE_FROM`` names another one."""
    return os.environ.get("UPGRADE_FROM") or last_release() or "HEAD"


def build(revision: str, folder: Path) -> Path:
    """Build the wheel of a revision, and unpack it into a folder, which is returned."""
    source, package = folder / "source", folder / "package"
    git("archive", "--format=zip", "-o", str(folder / "source.zip"), revision)
    shutil.unpack_archive(folder / "source.zip", source)
    command = [sys.executable, "-m", "build", "--wheel", "-o", folder / "dist", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    shutil.unpack_archive(wheel, package, "zip")
    return package
