# Generated from django_mysqlqueue/text/escaping.py by tools/shared_modules.py.
"""Escape characters that change what people see. This module does not import Django, because Spark's side has none."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache

HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of characters that are invisible or change the appearance of others: control characters, which a
terminal obeys, and those that change the direction of a text among them."""
IGNORABLE = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff"
)
"""The characters of other categories that fonts show nothing for, as ranges of a regular expression: those with the
property ``Default_Ignorable_Code_Point`` (UAX #44), such as variation selectors and fillers."""

EMOJI = (
    "\xa9\xae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u23cf\u23e9-\u23f3\u23f8-\u23fa"
    "\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030"
    "\u303d\u3297\u3299\U0001f000-\U0001faff"
)
IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
FLAGS = "|".join("".join(chr(0xE0000 + ord(one)) for one in name) for name in ("gbeng", "gbsct", "gbwls"))
"""The names of the flags that are written with tags."""


def _characters(first: int, last: int, prefix: str) -> str:
    """Return the characters of a range whose category begins with a prefix."""
    return "".join(chr(code) for code in range(first, last + 1) if unicodedata.category(chr(code)).startswith(prefix))


def _with_form(form: str) -> str:
    """Return the Arabic characters that have a form: ``"<initial>"`` if they join the one after them."""
    shapes = (unicodedata.decomposition(chr(code)).split() for code in (*range(0xFB50, 0xFDFF), *range(0xFE70, 0xFF00)))
    bases = {chr(int(shape[1], 16)) for shape in shapes if len(shape) == 2 and shape[0] == form}
    return "".join(one for one in _characters(0x600, 0x77F, "L") if one in bases or _base(one) in bases)


def _base(one: str) -> str:
    """Return the character that another one is joined like: TEH for TEH WITH RING."""
    try:
        return unicodedata.lookup(unicodedata.name(one).split(" WITH ")[0])
    except KeyError:
        return one


@cache
def _kept() -> re.Pattern[str]:
    """Return the pattern of the sequences in which invisible characters stay. Few processes need it."""
    return re.compile(f"({'|'.join(_sequences())})")


def _sequences() -> Iterable[str]:
    """Yield patterns of the sequences in which invisible characters stay."""
    # Emoji: UTS #51, ED-8a to ED-16.
    yield f"\U0001f3f4(?:{FLAGS})\U000e007f"
    yield "[0-9#*]\ufe0f\u20e3"
    yield f"[{EMOJI}](?:\ufe0e|(?:\ufe0f?\u200d[{EMOJI}])*\ufe0f?)"
    # Variants of ideographs (UTS #37) and of Mongolian characters.
    yield f"[{IDEOGRAPHS}][\ufe00-\ufe02\U000e0100-\U000e01ef]"
    yield "[\u1820-\u18aa][\u180b-\u180d\u180f]"
    # UTS #39, "Joining Controls": A1 for Arabic, A2 and B for the scripts from Devanagari to Sinhala. The standard
    # library does not have joining types, but the forms of Arabic characters for compatibility.
    marks = _characters(0x600, 0x77F, "Mn")
    yield f"[{_with_form('<initial>')}][{marks}]*\u200c(?=[{marks}]*[{_with_form('<final>')}])"
    consonants, marks = _characters(0x900, 0xDFF, "L"), _characters(0x900, 0xDFF, "M")
    viramas = "".join(one for one in marks if unicodedata.combining(one) == 9)
    yield f"[{consonants}][{marks}]*[{viramas}](?:\u200c(?=[{consonants}])|\u200d(?![{marks}]))"
    # The Unicode Standard, chapter 12, "Bengali (Bangla)": RA with ya-phalaa. Without the joiner, it is YA with reph.
    yield "\u09b0\u200d\u09cd(?=\u09af)"


INVISIBLE = re.compile(f"[{IGNORABLE}]")


def visible(text: str) -> str:
    r"""Return a text on one line, with invisible characters as escape sequences: ``\u202e`` for U+202E.

    Those above U+FFFF have eight digits, as in Python: ``\U000e0001``. Invisible characters stay where they belong to
    what is visible: inside emoji (UTS #51: joiners, presentation selectors, keycaps and flags), after ideographs and
    Mongolian characters that they select a variant of (UTS #37), and U+200C and U+200D in Arabic and Indic words if
    they change the shape of their neighbors: contexts A1, A2 and B of "Joining Controls" in UTS #39, formerly in UAX
    #31, and the Bangla RA with ya-phalaa, which these contexts do not include. Elsewhere, for example in Latin words or
    at the ends of a text, they would make two texts that look the same.
    The rules do not know fonts: a joiner between two emoji stays even if no font has one picture for both.
    """
    if text.isascii() and text.isprintable():
        return text
    parts = _kept().split(text)
    parts[::2] = map(_escaped, parts[::2])
    return "".join(parts)


def _escaped(text: str) -> str:
    return "".join(
        _escape(ord(one)) if unicodedata.category(one) in HIDDEN or INVISIBLE.match(one) else one for one in text
    )


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def visible_lines(text: str) -> str:
    """Return a text of several lines, which may be indented by tabs, with other invisible characters escaped."""
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in text.split("\n"))
