"""Blocks of other formats in the documents are well-formed."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import pytest
import yaml

from django_mysqlqueue.options import conf
from tests.support.documents import DOCS, PAGES, blocks, identify

pytestmark = pytest.mark.any_engine


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
