"""A test runner that leaves tests out, and stores the outcomes of the others."""

from __future__ import annotations

import json
import os
import unittest

from django.conf import settings
from django.test.runner import DiscoverRunner


def name_of(test):
    return ".".join(test.id().split(".")[-2:])


def tests_in(suite):
    for one in suite:
        yield from tests_in(one) if isinstance(one, unittest.TestSuite) else [one]


class Runner(DiscoverRunner):
    """The runner. Its input and its output are files of JSON."""

    def build_suite(self, *args, **kwargs):
        with open(os.environ["LEFT_OUT"]) as file:
            left_out = set(json.load(file))
        suite = super().build_suite(*args, **kwargs)
        names = {name_of(test) for test in tests_in(suite)}
        classes = {name.partition(".")[0] for name in names}
        if unknown := left_out - names - classes:
            raise SystemExit(f"There are no tests of these names: {unknown}")
        self.names = sorted(name for name in names if not {name, name.partition(".")[0]} & left_out)
        self.count = len(names)
        return type(suite)(test for test in tests_in(suite) if name_of(test) in self.names)

    def run_suite(self, suite, **kwargs):
        os.environ["TEST_DATABASE"] = str(settings.DATABASES["default"]["NAME"])
        result = super().run_suite(suite, **kwargs)
        failed = {name_of(getattr(test, "test_case", test)) for test, _ in (*result.failures, *result.errors)}
        skipped = {name_of(test): reason for test, reason in result.skipped}
        with open(os.environ["OUTCOMES"], "w") as file:
            json.dump({"count": self.count, "ran": self.names, "failed": sorted(failed), "skipped": skipped}, file)
        return result
