"""Characters that change what people see are escaped."""

from __future__ import annotations

import re

import pytest

from django_mysqlqueue.admin import charts
from django_mysqlqueue.escaping import visible, visible_lines

pytestmark = pytest.mark.any_engine


def test_lines_and_tabs_stay_and_the_rest_is_escaped():
    text = "a\n\tb\u202e\r\n\x07é\u2028"
    assert visible(text) == "a\\u000a\\u0009b\\u202e\\u000d\\u000a\\u0007é\\u2028"
    assert visible_lines(text) == "a\n\tb\\u202e\\u000d\n\\u0007é\\u2028"
    assert visible_lines("") == ""


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
