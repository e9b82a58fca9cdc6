"""Messages as they are stored."""

from __future__ import annotations

import json

from tests.support.internals import Message, decode, decode_metadata, encode


def stored(payload, **fields):
    return encode("t", Message(payload, **fields))


def metadata_of(row):
    return json.loads(row.metadata)


def round_trip(row):
    return decode(row.payload, decode_metadata(row.metadata))
