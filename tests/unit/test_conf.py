"""The MYSQLQUEUE setting: defaults, refusals, overriding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_mysqlqueue import publish
from django_mysqlqueue.options import conf
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.table import check_option
from django_mysqlqueue.options.validators import Address, Secret
from tests.support.internals import BellSettings, HealthSettings, get_settings

pytestmark = pytest.mark.any_engine

OPTIONAL = {"METRICS_TOKEN", "REDACT", "HEALTH"}
"""What only monitoring needs."""
DEFAULTS = {
    "DATABASE": None,
    "POLL_INTERVAL": 0.1,
    "MAX_POLL_INTERVAL": 1,
    "BELL": BellSettings(),
    "CLAIM_SIZE": 100,
    "PREFETCH": 200,
    "PRIORITY_SHARE": 16,
    "THREADS": 4,
    "ASYNC_CONCURRENCY": 100,
    "LEASE_DURATION": 30,
    "LEASE_RENEWAL_INTERVAL": 10,
    "VISIBILITY_TIMEOUT": 60,
    "MAX_PROCESSING_TIME": 600,
    "SHUTDOWN_TIMEOUT": 25,
    "MAX_ATTEMPTS": 5,
    "BACKOFF": Backoff(initial=1, factor=2, maximum=3600, jitter=0.2),
    "RETENTION": 86400,
    "ORPHAN_RETENTION": 7 * 86400,
    "STRICT_TOPICS": False,
    "DLQ_SUFFIX": "_dlq",
    "DLQ_RETENTION": None,
    "MAX_PAYLOAD_BYTES": 1048576,
    "KEYLESS_PARTITIONS": 16,
    "EAGER": False,
    "RUN_IN_SERVER": False,
    "RECORD_DELIVERIES": "failures",
    "HISTORY_RETENTION": 7 * 86400,
    "RESULTS_RETENTION": 7 * 86400,
    "ARCHIVE_PATH": None,
    "ARCHIVE_REQUIRED": False,
    "METRICS_TOKEN": None,
    "REDACT": None,
    "HEALTH": HealthSettings(
        window=600,
        max_recent_dead_letters=10,
        max_failure_ratio=0.5,
        min_attempts=10,
        max_round_trip=0.25,
        max_log_size=10 * 2**30,
    ),
    "TOPICS": {},
    "GROUPS": {},
    "RECURRING": {},
}


# -- defaults -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_default(mysqlqueue, name, value):
    assert mysqlqueue({}) == []
    assert getattr(get_settings(), name.lower()) == value


def test_the_defaults_written_out_are_sound_and_change_nothing(mysqlqueue):
    assert mysqlqueue({}) == []
    implied = get_settings()
    assert mysqlqueue(DEFAULTS) == []
    assert get_settings() == implied


def test_no_other_setting_exists():
    """A setting without a default in the issue would be neither documented nor tested here."""
    names = {name.upper() for name in conf.Settings.__dataclass_fields__}
    assert names - {"RECORDED", "SQL_TOPICS", "MONITORING"} | OPTIONAL == set(DEFAULTS)
    assert {name.upper() for name in get_settings().monitoring} == OPTIONAL


def test_a_project_without_the_setting_gets_the_defaults(settings):
    del settings.MYSQLQUEUE
    assert conf.problems() == []
    assert get_settings() == conf.Settings()


# -- what is taken ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("DATABASE", "other", "other"),
        ("POLL_INTERVAL", 1, 1.0),
        ("MAX_ATTEMPTS", None, None),
        ("MAX_ATTEMPTS", 1, 1),
        ("RETENTION", None, None),
        ("RETENTION", 0, 0.0),
        ("ORPHAN_RETENTION", None, None),
        ("ORPHAN_RETENTION", 60, 60.0),
        ("STRICT_TOPICS", True, True),
        ("DLQ_RETENTION", 5, 5.0),
        ("SHUTDOWN_TIMEOUT", 0, 0.0),
        ("PRIORITY_SHARE", 0, 0),
        ("PRIORITY_SHARE", 2, 2),
        ("CLAIM_SIZE", 1, 1),
        ("CLAIM_SIZE", 10_000, 10_000),
        ("KEYLESS_PARTITIONS", 1, 1),
        ("MAX_PAYLOAD_BYTES", 2**30, 2**30),
        ("DLQ_SUFFIX", "." * 20, "." * 20),
        ("REDACT", None, None),
        ("REDACT", str.upper, str.upper),
        ("REDACT", "shop.privacy.redact", "shop.privacy.redact"),
        ("METRICS_TOKEN", "", None),
        ("BELL", None, None),
        ("BELL", {}, BellSettings()),
        ("BELL", {"DIRECTORY": "/run/shop"}, BellSettings(directory="/run/shop")),
        ("BELL", {"DIRECTORY": Path("/run/shop"), "GROUP": "shop"}, BellSettings(directory="/run/shop", group="shop")),
        ("BELL", {"SECRET": "s" * 16}, BellSettings(secret=Secret("s" * 16))),
        (
            "BELL",
            {"LISTEN": "0.0.0.0:7070", "ANNOUNCE": "[FD00::1]:7071", "SECRET": "s" * 16},
            BellSettings(None, None, Address.parse("0.0.0.0:7070"), Address.parse("[fd00::1]:7071"), Secret("s" * 16)),
        ),
        ("HEALTH", {}, HealthSettings()),
        ("HEALTH", {"WINDOW": 60, "MIN_ATTEMPTS": 1}, HealthSettings(window=60.0, min_attempts=1)),
        ("HEALTH", {"MAX_ROUND_TRIP": None}, HealthSettings(max_round_trip=None)),
        ("HEALTH", {"MAX_FAILURE_RATIO": None}, HealthSettings(max_failure_ratio=None)),
        ("HEALTH", {"MAX_RECENT_DEAD_LETTERS": 0}, HealthSettings(max_recent_dead_letters=0)),
        ("BACKOFF", {"initial": 3}, Backoff(initial=3)),
        ("BACKOFF", {"INITIAL": 3, "Jitter": 0}, Backoff(initial=3, jitter=0)),
        ("BACKOFF", Backoff(initial=7), Backoff(initial=7)),
    ],
)
def test_value_taken(mysqlqueue, name, given, value):
    assert mysqlqueue({name: given}) == []
    found = getattr(get_settings(), name.lower())
    assert found == value
    assert type(found) is type(value)


SECONDS = ("POLL_INTERVAL", "MAX_POLL_INTERVAL", "LEASE_DURATION", "LEASE_RENEWAL_INTERVAL")
TIMEOUTS = ("VISIBILITY_TIMEOUT", "MAX_PROCESSING_TIME")
RETENTIONS = ("RETENTION", "ORPHAN_RETENTION", "DLQ_RETENTION", "HISTORY_RETENTION", "RESULTS_RETENTION")
COUNTS = (
    "CLAIM_SIZE",
    "PREFETCH",
    "THREADS",
    "ASYNC_CONCURRENCY",
    "MAX_ATTEMPTS",
    "MAX_PAYLOAD_BYTES",
    "KEYLESS_PARTITIONS",
)
NO_NUMBER = ("1", True, [], float("nan"))
NO_INTEGER = ("1", True, [], 1.0, float("nan"))
WRONG = [
    *((name, value) for name in (*SECONDS, *TIMEOUTS) for value in (*NO_NUMBER, None, 0, -1, float("inf"))),
    *((name, value) for name in (*RETENTIONS, "SHUTDOWN_TIMEOUT") for value in (*NO_NUMBER, -1, float("inf"))),
    *((name, value) for name in COUNTS for value in (*NO_INTEGER, 0, -1, 2**31)),
    *((name, 30 * 86400 + 1) for name in TIMEOUTS),
    *(("PRIORITY_SHARE", value) for value in (*NO_INTEGER, -1, 1, 1_000_001)),
    ("SHUTDOWN_TIMEOUT", None),
    ("CLAIM_SIZE", 10_001),
    ("THREADS", 1001),
    ("ASYNC_CONCURRENCY", 10_001),
    ("KEYLESS_PARTITIONS", 100_001),
    ("MAX_PAYLOAD_BYTES", 2**30 + 1),
    *((name, value) for name in ("EAGER", "RUN_IN_SERVER", "STRICT_TOPICS") for value in (None, 1, "yes")),
    *(("RECORD_DELIVERIES", value) for value in (None, True, "acks", "ALL")),
    ("HISTORY_RETENTION", None),
    ("RESULTS_RETENTION", None),
    *((name, None) for name in COUNTS if name != "MAX_ATTEMPTS"),
    ("DATABASE", "nowhere"),
    ("DATABASE", 1),
    ("DATABASE", ["default"]),
    *(("DLQ_SUFFIX", value) for value in ("", "x" * 21, "é", "a b", None, 1)),
    *(("BACKOFF", value) for value in (None, 1, "x", [1], {"initial": "1"}, {"initial": -1}, {"factor": 0.5})),
    *(("BACKOFF", value) for value in ({"jitter": 1.1}, {"maximum": 15 * 86400 + 1}, {"speed": 1}, {1: 1})),
    *(("REDACT", value) for value in ("", "redact", "shop.", ".redact", "shop privacy.redact", "shop:redact", 1, {})),
    *(("ARCHIVE_PATH", value) for value in ("", 5, b"archive")),
    *(("ARCHIVE_REQUIRED", value) for value in (None, 1, "yes")),
    *(("RECURRING", value) for value in (None, [], "nightly")),
    *(("METRICS_TOKEN", value) for value in ("short", "with a space in the token", "é" * 30, 5, b"x" * 30)),
    *(("BELL", value) for value in (5, True, "", [], {"DIRECTORY": "run"}, {"DIRECTORY": b"/run"}, {"DIRECTORY": 1})),
    *(("BELL", value) for value in ({"GROUP": ""}, {"GROUP": 5}, {"GROUPS": "shop"})),
    *(("BELL", {"LISTEN": value}) for value in ("", 7070, ":7070", "localhost:7070", "10.0.0.5", "10.0.0.5:0")),
    *(("BELL", {"LISTEN": value}) for value in ("1.2.3.4:65536", "1.2.3:7070", "::1:7070", "[::1%lo]:7070")),
    *(("BELL", {"ANNOUNCE": value}) for value in ("0.0.0.0:7070", "[::]:7070", "shop.example.com:7070", b"x")),
    *(("BELL", value) for value in ({"LISTEN": "0.0.0.0:7070"}, {"ANNOUNCE": "10.0.0.5:7070"})),
    *(("HEALTH", value) for value in (None, 5, [], "", {"WINDOW": 59}, {"WINDOW": 21_601}, {"WINDOWS": 60})),
    *(("HEALTH", {"MAX_FAILURE_RATIO": value}) for value in (-0.1, 1.1, True, "0.5", float("nan"))),
    *(("HEALTH", {"MAX_RECENT_DEAD_LETTERS": value}) for value in (-1, 10_000, 1.5, True)),
    *(("HEALTH", {"MIN_ATTEMPTS": value}) for value in (0, None, "1")),
    *(("HEALTH", {"MAX_ROUND_TRIP": value}) for value in (-1, "fast")),
    ("HEALTH", HealthSettings(min_attempts=0)),
    *(("BACKOFF", value) for value in (Backoff(initial=-1), Backoff(jitter=float("nan")), Backoff(factor=True))),
]


# -- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:40])
def test_value_refused(mysqlqueue, name, value):
    found = [problem for problem in mysqlqueue({name: value}) if problem.id == "E003"]
    assert len(found) == 1
    if name == "METRICS_TOKEN":
        assert f"MYSQLQUEUE[{name!r}] = …" in found[0].message
        assert not value or str(value) not in found[0].message, "a secret is not shown"
    else:
        assert f"MYSQLQUEUE[{name!r}] = {value!r}" in found[0].message
    with pytest.raises(ImproperlyConfigured, match=re.escape(f"MYSQLQUEUE[{name!r}]")):
        getattr(get_settings(), name.lower())


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ({"SECRET": "fifteen letters"}, "has SECRET = …, which must be a string of at least 16 characters."),
        ({"SECRET": b"sixteen  letters"}, "has SECRET = …, which must be a string of at least 16 characters."),
        ({"SECRET": "the key of the site"}, "has SECRET = …, which must not be SECRET_KEY: .*"),
        ({"SECRET": "of the rings alone", "ANNOUNCE": "10.0.0.5:7070"}, "has ANNOUNCE, which requires LISTEN."),
        ({"LISTEN": "10.0.0.5:7070"}, "has LISTEN, which requires SECRET."),
    ],
)
def test_an_error_of_the_bell_names_the_rule_and_not_the_secret(mysqlqueue, settings, value, rule):
    settings.SECRET_KEY = "the key of the site"  # noqa: S105
    (problem,) = mysqlqueue({"BELL": value})
    assert re.fullmatch(f".*{rule}", problem.message)
    assert "SECRET" not in value or str(value["SECRET"]) not in str(problem)


def test_the_secret_of_the_bell_is_not_shown(mysqlqueue):
    key = "of the rings alone"
    assert mysqlqueue({"BELL": {"SECRET": key}}) == []
    assert get_settings().bell.secret == key
    assert key not in repr(get_settings())


def test_every_setting_refuses_something():
    """A new setting without a parser that says no would not be seen otherwise."""
    assert {name for name, _ in WRONG} == set(DEFAULTS) - {"TOPICS", "GROUPS"}


@pytest.mark.promise("Health")
@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_a_bad_setting_of_monitoring_stops_no_publisher(mysqlqueue, db, name):
    (problem,) = mysqlqueue({name: 5, "THREADS": 2})
    assert (problem.id, problem.optional) == ("E003", True)
    assert publish("t", 1)
    assert get_settings().threads == 2
    for _ in range(2):
        with pytest.raises(ImproperlyConfigured, match=f"{name}.*must be"):
            getattr(get_settings(), name.lower())


def test_an_error_of_health_names_the_key_and_the_rule(mysqlqueue):
    (problem,) = mysqlqueue({"HEALTH": {"MAX_FAILURE_RATIO": 50}})
    assert problem.message.endswith("has MAX_FAILURE_RATIO = 50, which must be a number from 0 to 1.")
    (problem,) = mysqlqueue({"HEALTH": {"MAX_FAILURE_RATE": 0.5}})
    assert problem.message.endswith("the unknown key 'MAX_FAILURE_RATE' (Did you mean MAX_FAILURE_RATIO?).")


@pytest.mark.parametrize("value", [None, [], "x", 1, [("THREADS", 4)]])
def test_setting_must_be_a_dict(mysqlqueue, value):
    (problem,) = mysqlqueue(value)
    assert problem.id == "E001"
    assert type(value).__name__ in problem.message
    with pytest.raises(ImproperlyConfigured, match="must be a dict"):
        get_settings()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("TREADS", "Did you mean THREADS?"),
        ("LEASE_DURATON", "Did you mean LEASE_DURATION?"),
        ("QUITE_ANOTHER_THING", "Known: ARCHIVE_PATH, ARCHIVE_REQUIRED, ASYNC_CONCURRENCY, BACKOFF,"),
        ("poll_interval", "Did you mean POLL_INTERVAL?"),
        ("colour", "Known: ARCHIVE_PATH, ARCHIVE_REQUIRED, ASYNC_CONCURRENCY, BACKOFF,"),
        (7, "Known: ARCHIVE_PATH, ARCHIVE_REQUIRED, ASYNC_CONCURRENCY, BACKOFF,"),
    ],
)
def test_unknown_key(mysqlqueue, key, hint):
    (problem,) = mysqlqueue({key: 1})
    assert problem.id == "E002"
    assert repr(key) in problem.message
    assert problem.hint.startswith(hint)
    with pytest.raises(ImproperlyConfigured, match=re.escape(hint)):
        get_settings()


def test_every_problem_is_reported_not_only_the_first(mysqlqueue):
    found = mysqlqueue({"TREADS": 1, "CLAIM_SIZE": 0, "TOPICS": 1, "GROUPS": {"g": {"mode": "ordered"}}})
    assert [problem.id for problem in found] == ["E002", "E003", "E005", "E006"]


# -- relations ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("lease", "renewal", "sound"),
    [(30, 15, True), (30, 15.1, False), (30, 30, False), (20, None, True), (5, None, False)],
)
def test_renewal_must_be_well_below_the_lease(mysqlqueue, lease, renewal, sound):
    value = {"LEASE_DURATION": lease}
    if renewal is not None:
        value["LEASE_RENEWAL_INTERVAL"] = renewal
    found = mysqlqueue(value)
    assert [problem.id for problem in found] == ([] if sound else ["E004"])
    if not sound:
        assert "LEASE_RENEWAL_INTERVAL" in found[0].message
        assert found[0].hint
        with pytest.raises(ImproperlyConfigured):
            get_settings()


@pytest.mark.parametrize(
    ("shortest", "longest", "sound"), [(1, 1, True), (1.5, 1, False), (2, 3, True), (0.1, 0.05, False)]
)
def test_poll_intervals_must_not_cross(mysqlqueue, shortest, longest, sound):
    found = mysqlqueue({"POLL_INTERVAL": shortest, "MAX_POLL_INTERVAL": longest})
    assert [problem.id for problem in found] == ([] if sound else ["E004"])


# -- overriding ---------------------------------------------------------------


def test_override_settings_works_at_once_and_ends():
    before = get_settings().threads
    with override_settings(MYSQLQUEUE={"THREADS": before + 5}):
        assert get_settings().threads == before + 5
        with override_settings(MYSQLQUEUE={"THREADS": before + 6}):
            assert get_settings().threads == before + 6
        assert get_settings().threads == before + 5
    assert get_settings().threads == before


def test_a_broken_setting_is_refused_at_every_access():
    """An error that was cached away would let the second access through."""
    with override_settings(MYSQLQUEUE={"THREADS": 0}):
        for _ in range(2):
            with pytest.raises(ImproperlyConfigured, match="THREADS"):
                get_settings()
    assert get_settings().threads


def test_settings_cannot_be_changed_by_accident():
    with pytest.raises(AttributeError):
        get_settings().threads = 3


# -- handler options ----------------------------------------------------------


def test_handler_option_errors_name_option_value_and_rule():
    with pytest.raises(ValueError, match=r"max_attempts=0: must be from 1 to"):
        check_option("max_attempts", 0)
    with pytest.raises(ValueError, match="speed is not a handler option"):
        check_option("speed", 1)


@pytest.mark.parametrize("key", ["SECRET", "SECRETS", "secret"])
def test_a_secret_with_a_misspelled_key_is_not_shown(settings, key):
    settings.MYSQLQUEUE = {"BELL": {key: "not to be shown", "LISTEN": "nowhere"}}
    assert conf.problems()
    assert not any("not to be shown" in one.message for one in conf.problems())
