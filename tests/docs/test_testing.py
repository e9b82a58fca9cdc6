"""The examples of the pages about testing run as the tests of a project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.documents import DOCS, blocks
from tests.support.paths import ROOT

pytestmark = pytest.mark.any_engine
PAGES = ("howto/test.md", "reference/testing.md")
CONFTEST = """
import pytest
from orders.services import place_order


@pytest.fixture
def order(db):
    return place_order("Emma", "ada@example.com")
"""
SIGNATURE = "# from django_mysqlqueue"
"""The beginning of a block with the signature of a function."""


def _examples() -> list[str]:
    found = [text for page in PAGES for _, text in blocks(DOCS / page, "python")]
    return [text for text in found if not text.startswith((SIGNATURE, "def ", "@"))]


def test_the_examples_of_tests_pass(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tests" / "orders_project", project)
    (project / "conftest.py").write_text(CONFTEST)
    examples = _examples()
    for number, text in enumerate(examples):
        if "def test_" in text:
            (project / f"test_example_{number}.py").write_text(text)
        else:  # a handler
            with (project / "orders" / "subscribers.py").open("a") as handlers:
                handlers.write(f"\n\n{text}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(project))
    done = subprocess.run(
        [sys.executable, *command, "--ds=settings", str(project)],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
    )
    expected = sum(len(re.findall(r"def test_", text)) for text in examples)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{expected} passed" in done.stdout
    assert expected > 15
