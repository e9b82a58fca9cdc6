"""A supervised process: its lifeline, its signs of progress, its memory."""

from __future__ import annotations

import contextlib
import json
import os
import time

import pytest
from django.db import OperationalError

from tests.support.harness import USING, handler, in_thread
from tests.support.internals import HeartbeatFile, Incarnation, Lifeline, Subscriber, get_settings, lifeline, memory

pytestmark = pytest.mark.any_engine


# -- the child's side ---------------------------------------------------------


def test_a_supervisor_of_another_version_is_understood(monkeypatch):
    """The package is upgraded under a running supervisor: what it tells a new child is what its version told."""
    reading, writing = os.pipe()
    told = {"pipe": writing, "parent": os.getppid(), "number": 2, "reload": False, "suffix": "0f"}
    try:
        for more in ({}, {"predecessor": [7, "0e"], "of a later version": 1}):
            monkeypatch.setenv(lifeline.VARIABLE, json.dumps({**told, **more}))
            line = Lifeline.inherited()
            assert line is not None
            assert line.number == 2
            assert line.suffix == "0f"
            assert line.predecessor == (Incarnation(7, "0e") if more else None)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_lifeline_is_inherited_once_and_tells_when_it_is_cut(monkeypatch):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    lost = Incarnation(17, "abcd")
    described = Lifeline(writing, os.getppid(), 3, reload=False, suffix="0f", predecessor=lost).described()
    for name, value in described.items():
        monkeypatch.setenv(name, value)
    line = Lifeline.inherited()
    assert line.number == 3
    assert (line.suffix, line.predecessor) == ("0f", lost)
    assert lifeline.VARIABLE not in os.environ
    assert Lifeline.inherited() is None
    assert not os.get_inheritable(writing)
    assert not os.get_blocking(writing)
    line.sign(progress=True)
    line.sign(progress=False)
    line.ask_replacement()
    assert os.read(reading, 10) == b"par"
    assert not line.is_cut()
    os.close(reading)
    line.sign(progress=True)
    assert line.is_cut()
    os.close(writing)


def test_a_full_pipe_does_not_block_a_child():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    line = Lifeline(writing, os.getppid(), 1, reload=False, suffix="0f")
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"a" * 4096)
    line.sign(progress=True)
    assert not line.is_cut()
    os.close(reading)
    os.close(writing)


def test_signs_tell_life_from_progress(db, tmp_path):
    path = tmp_path / "alive"
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    one = handler()
    sub = Subscriber(
        {USING: {one.ref: one}},
        get_settings(),
        heartbeat_file=HeartbeatFile(str(path)),
        lifeline=Lifeline(writing, os.getppid(), 1, reload=False, suffix="0f"),
    )
    for stuck_for, sign in ((0, lifeline.PROGRESS), (31, lifeline.ALIVE)):
        os.utime(path, (0, 0))
        sub.workers[0].progress.at = time.monotonic() - stuck_for
        sub._signs_at = 0.0
        sub._give_signs()
        assert os.read(reading, 10) == sign
        assert (path.stat().st_mtime > 0) == (sign == lifeline.PROGRESS)
    sub._give_signs()  # not yet: it is not a second later
    with pytest.raises(BlockingIOError):
        os.read(reading, 10)
    os.close(reading)
    sub._signs_at = 0.0
    sub._give_signs()
    assert sub._stop.event.is_set()  # nobody reads any more
    os.close(writing)


def test_a_database_that_is_away_is_no_lack_of_progress(db, monkeypatch):
    one = handler()
    poller = Subscriber({USING: {one.ref: one}}, get_settings()).workers[0].poller
    progress = []

    def fail():
        progress.append(poller.context.progress.at)
        raise OperationalError("away")

    monkeypatch.setattr(poller, "step", fail)
    in_thread(lambda: poller.run(lambda: len(progress) == 3))
    assert progress[0] < progress[1] < progress[2]


def test_resident_memory_is_that_of_this_process():
    before = memory.resident_mb()
    assert 10 < before < 4000
    ballast = b"x" * (200 << 20)
    assert memory.resident_mb() > before + 150
    del ballast


def test_a_heartbeat_file_that_fails_is_said_once_and_recovers(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    file = HeartbeatFile(str(folder / "alive"))
    (folder / "alive").unlink()
    folder.rmdir()
    file.touch()
    file.touch()
    assert caplog.text.count("heartbeat_file.failed") == 1
    folder.mkdir()
    file.touch()
    assert (folder / "alive").exists()


def test_memory_without_proc(tmp_path):
    assert 5 < memory.resident_mb(tmp_path / "none") < 100_000
