"""Characters that change what people see are escaped."""

from __future__ import annotations

import re

import pytest

from django_mysqlqueue.admin import charts
from tests.support.internals import visible, visible_lines

pytestmark = pytest.mark.any_engine


def test_lines_and_tabs_stay_and_the_rest_is_escaped():
    text = "a\n\tb\u202e\r\n\x07é\u2028"
    assert visible(text) == "a\\u000a\\u0009b\\u202e\\u000d\\u000a\\u0007é\\u2028"
    assert visible_lines(text) == "a\n\tb\\u202e\\u000d\n\\u0007é\\u2028"
    assert visible_lines("") == ""


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
MENDED_HEART = "\u2764\ufe0f\u200d\U0001fa79"
SCOTLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"
PERSIAN = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
PASHTO = "\u0685\u200c\u0681"
VOCALIZED = "\u0645\u06cc\u0650\u200c\u0650\u062e"
SINHALA = "\u0d9a\u0dca\u200d\u0dc2\u0dca\u200d\u0dba"
HINDI = "\u0915\u094d\u200c\u0937 \u0915\u094d\u200d\u0937"
MALAYALAM = "\u0d05\u0d35\u0d28\u0d4d\u200d"
BANGLA = "\u09b0\u200d\u09cd\u09af\u09be\u09ac"


@pytest.mark.parametrize(
    "text",
    [
        FAMILY,
        MENDED_HEART,
        "\U0001f469\U0001f3fd\u200d\U0001f692",  # with a skin tone
        "\U0001f3f3\ufe0f\u200d\U0001f308",
        "\u2602\ufe0e\u2602\ufe0f",
        "#\ufe0f\u20e31\ufe0f\u20e3",
        SCOTLAND,
        "\U0001f1eb\U0001f1ee",
        PERSIAN,
        PASHTO,
        VOCALIZED,
        SINHALA,
        HINDI,
        MALAYALAM,
        BANGLA,
        f"\u0995\u09cd{BANGLA}\u09b2\u09bf",
        "\u845b\U000e0100\u57ce \u8fbb\ufe00",
        "\u182d\u180b",
        f"a{FAMILY}{FAMILY}b {MENDED_HEART}{PERSIAN}",
    ],
)
def test_joiners_and_selectors_of_what_is_visible_stay(text):
    assert visible(text) == text
    assert visible_lines(f"\t{text}\n{text}") == f"\t{text}\n{text}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ad\u200dmin", "ad\\u200dmin"),
        ("ad\u200cmin\ufe0f", "ad\\u200cmin\\ufe0f"),
        ("1\ufe0f", "1\\ufe0f"),
        ("\u0433\u200d\u0434", "\u0433\\u200d\u0434"),
        (f"\u200d{FAMILY}\u200d", f"\\u200d{FAMILY}\\u200d"),
        (f"{FAMILY}\u200da", f"{FAMILY}\\u200da"),
        ("\U0001f468\u200d\u200d\U0001f469", "\U0001f468\\u200d\\u200d\U0001f469"),
        ("\u2764\ufe0f\ufe0f", "\u2764\ufe0f\\ufe0f"),
        ("\U0001f468\u200c\U0001f469", "\U0001f468\\u200c\U0001f469"),
        ("\U0001f468\u200d\U0001f469\u202e", "\U0001f468\u200d\U0001f469\\u202e"),
        # Tags that are not a flag's.
        (SCOTLAND[1:], "".join(f"\\U{ord(one):08x}" for one in SCOTLAND[1:])),
        (SCOTLAND[:-1], SCOTLAND[0] + "".join(f"\\U{ord(one):08x}" for one in SCOTLAND[1:-1])),
        # ALEF and DAL do not join the letter after them, so nothing changes.
        ("\u0627\u200c\u0628", "\u0627\\u200c\u0628"),
        ("\u062f\u200c\u0631", "\u062f\\u200c\u0631"),
        ("\u0628\u200c\u200c\u0628", "\u0628\\u200c\\u200c\u0628"),
        (f"{PERSIAN}\u200c", f"{PERSIAN}\\u200c"),
        (f"\u200c{PERSIAN}", f"\\u200c{PERSIAN}"),
        ("\u06cc\u200d\u062e", "\u06cc\\u200d\u062e"),
        ("\u0628\u200ca", "\u0628\\u200ca"),
        # Not behind a virama; without a letter behind it; before a vowel sign.
        ("\u0915\u200d\u0937", "\u0915\\u200d\u0937"),
        ("\u0915\u094d\u200c", "\u0915\u094d\\u200c"),
        ("\u0915\u094d\u200d\u093f", "\u0915\u094d\\u200d\u093f"),
        ("\u094d\u200d\u0937", "\u094d\\u200d\u0937"),
        # RA keeps its joiner only before ya-phalaa.
        ("\u09b0\u200d\u09cd\u0995", "\u09b0\\u200d\u09cd\u0995"),
        ("\u0995\u200d\u09cd\u09af", "\u0995\\u200d\u09cd\u09af"),
        ("\u09b0\u200c\u09cd\u09af", "\u09b0\\u200c\u09cd\u09af"),
        ("\u09b0\u200d\u09af", "\u09b0\\u200d\u09af"),
        ("\u09b0\u200d\u200d\u09cd\u09af", "\u09b0\\u200d\\u200d\u09cd\u09af"),
        # Characters that are not of the category Cf, and as invisible.
        ("a\u034f\u3164\uffa0\u115f", "a\\u034f\\u3164\\uffa0\\u115f"),
        ("a\U000e0100", "a\\U000e0100"),
        ("a\u180b", "a\\u180b"),
        ("\u845b\ufe0f", "\u845b\\ufe0f"),
    ],
)
def test_joiners_and_selectors_that_change_nothing_are_escaped(text, shown):
    assert visible(text) == shown


def test_marks_and_spaces_stay():
    text = "Z\u0301a\u0308 \u0301\xa0 caf\xe9 \u0e01\u0e33"
    assert visible(text) == text


@pytest.mark.parametrize("values", [[1, 2, 1], [5], [0, 10**12, 3], [0, 0]])
def test_the_parts_of_a_bar_fill_it_and_are_all_visible(values):
    bar = charts.strip([("mq-acked", f"<{value}>", value) for value in values], "a <label>")
    rects = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', bar)]
    assert len(rects) == len(values)
    place = 0.0
    for x, width in rects:
        assert x == pytest.approx(place, abs=0.02)
        assert width >= 2.9
        place = x + width
    assert place == pytest.approx(charts.WIDTH, abs=0.05)
    assert "<label>" not in bar
    assert "<title>&lt;" in bar
