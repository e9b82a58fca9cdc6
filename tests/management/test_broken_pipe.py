"""Commands whose output nobody reads any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from django_mysqlqueue.management.base import BROKEN_PIPE
from tests.support.processes import environment

PROJECT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["queuestatus", "queuehealth", "queueoperations"])
def test_a_command_ends_quietly_if_the_reader_of_its_output_has_ended(db, name):
    code = (
        "import sys; from django.core.management import execute_from_command_line as run; "
        f"sys.stdin.read(); run(['manage.py', '{name}'])"
    )
    pipe = subprocess.PIPE
    command = subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    command.stdout.close()
    command.stdin.close()
    errors = command.stderr.read()
    command.stderr.close()
    assert (command.wait(60), errors) == (BROKEN_PIPE, "")
