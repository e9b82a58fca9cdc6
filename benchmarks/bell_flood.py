#!/usr/bin/env python3
"""Measure what a flood of packets costs the subscriber that listens for other hosts.

    python tools/servers.py run mariadb -- python benchmarks/bell_flood.py

An idle subscriber listens at a UDP port of this host, to which another process sends nothing, garbage, packets with a
wrong HMAC, and one right packet again and again. The CPU time is that of all threads of the subscriber, as a share of
one core; the queries are those of the server, so those of the polls.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

SECRET = "a key of the benchmark alone"  # noqa: S105


def flood(packet: bytes, port: int, rate: int) -> None:
    """Send packets at a rate, until it is terminated."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        began, sent = time.monotonic(), 0
        while True:
            while sent < (time.monotonic() - began) * rate:
                sender.sendto(packet, ("127.0.0.1", port))
                sent += 1
            time.sleep(0.001)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def queries() -> int:
    """Return how many queries the server has answered; 0 on SQLite."""
    from django.db import connection

    if connection.vendor != "mysql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(cursor.fetchone()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="duration of each measurement (default: 10)")
    parser.add_argument("--rate", type=int, default=50_000, help="packets per second (default: 50,000)")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    common.set_up()
    from django.test import override_settings

    from django_mysqlqueue.models import SubscriberHeartbeat
    from django_mysqlqueue.service import bell, remote_bell

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        there = {"DIRECTORY": directory, "LISTEN": f"127.0.0.1:{port}", "SECRET": SECRET}
        with override_settings(MYSQLQUEUE={"BELL": there}):
            folder = bell.folder_of("default", "latency")
            assert folder is not None
            name = b"mq1" + "".join(folder.split("/")[-2:]).encode()
            settings = remote_bell.get_settings().bell
            assert settings is not None
            right = name + remote_bell._mac(settings, name)
        floods = {
            "nothing": None,
            "garbage": secrets.token_bytes(1000),
            "a wrong HMAC": right[:27] + secrets.token_bytes(16),
            "a right one": right,
        }
        results = {}
        with common.subscribers(1, "--topic", "latency", "--group", "g1", BELL=there) as running:
            common.wait_for(lambda: SubscriberHeartbeat.objects.exists())
            time.sleep(3)
            (process,) = running.processes
            for what, packet in floods.items():
                sender = None
                if packet is not None:
                    sender = multiprocessing.Process(target=flood, args=(packet, port, options.rate))
                    sender.start()
                    time.sleep(1)
                began, cpu, asked = time.monotonic(), cpu_seconds(process.pid), queries()
                time.sleep(options.seconds)
                took = time.monotonic() - began
                results[what] = {
                    "cpu_percent": round(100 * (cpu_seconds(process.pid) - cpu) / took, 1),
                    "queries_per_second": round((queries() - asked) / took, 1),
                }
                if sender is not None:
                    sender.terminate()
                    sender.join()
    table = [["flood", "CPU %", "queries/s"]]
    table += [[what, str(row["cpu_percent"]), str(row["queries_per_second"])] for what, row in results.items()]
    common.report("bell_flood", {"rate": options.rate, "results": results}, table, options.json)


if __name__ == "__main__":
    main()
