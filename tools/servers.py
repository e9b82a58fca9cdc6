#!/usr/bin/env python3
"""Private MariaDB and MySQL servers for tests and demos.

Standard library only, so that it runs before any package is installed. Each server has a temporary folder, listens only
on a Unix socket, and is stopped by the process that started it. Other servers are never touched.

    tools/servers.py install mariadb mysql           # download the servers
    tools/servers.py install browser                 # install Chromium for the tests of the dashboard
    tools/servers.py install promtool                # download promtool for the tests of the alert rules
    tools/servers.py run mariadb -- COMMAND          # run COMMAND with DATABASE_URL set
    tools/servers.py run mariadb-10.11 -- COMMAND    # with the oldest supported version of MariaDB
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("mariadb", "mysql")
DATABASE = "mysqlqueue"
# Debian packages that mysqlclient needs for its compilation.
DRIVER_PACKAGES = ("gcc", "libc6-dev", "libmariadb-dev", "pkg-config")
JAVA_PACKAGES = ("openjdk-17-jre-headless",)
JAVA_VERSION = 17
BROWSER_PACKAGES = ("chromium", "fonts-dejavu-core")
CLIENT_PACKAGES = ("mariadb-client-core",)
"""The command-line client, which sets up servers of both kinds."""
CLOCK_PACKAGES = ("libfaketime",)
NODE_PACKAGES = ("nodejs", "npm")
NODE_DRIVER = "mysql2@3.24.6"
CHROMIUM = "/usr/bin/chromium"
# Architecture → name of glibc's loader, library folder.
LOADERS = {
    "x86_64": ("ld-linux-x86-64.so.2", "x86_64-linux-gnu"),
    "aarch64": ("ld-linux-aarch64.so.1", "aarch64-linux-gnu"),
}
START_TIMEOUT = 120.0
MEMORY = Path("/dev/shm")  # noqa: S108  # Each server makes a folder of its own there.
MEMORY_NEEDED = 12 * 1024**3
"""Bytes of free memory with which servers may have their files there: those of one grew to 3 GiB."""


class NotAvailable(Exception):
    """Something cannot be installed or started on this machine. The message gives the reason."""


@dataclass(frozen=True)
class Build:
    """A program of a Debian suite. It is unpacked into the cache folder, so that each version runs on each Debian."""

    suite: str
    package: str
    binary: str
    is_alone: bool = False
    """Whether it runs with the libraries of any system, so that no other package is downloaded."""


BUILDS = {
    "mariadb": Build("trixie", "mariadb-server-core", "mariadbd"),  # 11.8
    "mariadb-10.11": Build("bookworm", "mariadb-server-core", "mariadbd"),  # the oldest supported version
    "mysql": Build("sid", "mysql-server-core", "mysqld"),
}
PROMTOOL = Build("bookworm", "prometheus", "promtool", is_alone=True)  # 2.42


@dataclass
class Server:
    """A private server, which can be stopped and restarted on the same data."""

    engine: str
    socket: Path
    folder: Path
    command: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError(f"the {self.engine} server is not running")
        return self.process.pid

    def start(self, *extra: str) -> None:
        """Start the server, with additional options if given, and wait until it answers."""
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen([*self.command, *extra], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        _wait_until_ready(self, self.process)

    def stop(self) -> None:
        """Shut the server down. Do nothing if it is not running."""
        if self.process is not None:
            _stop(self.process)
            self.process = None

    def kill(self) -> None:
        """End the server with SIGKILL, as if the host had lost power."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def execute(self, sql: str) -> str:
        """Run statements as root. Return the client's output."""
        done = _client(self, sql)
        if done.returncode:
            raise RuntimeError(f"{sql}: {done.stderr}")
        return done.stdout

    @property
    def url(self) -> str:
        """A ``DATABASE_URL`` for django-environ: root without a password, by socket."""
        return f"mysql://root@/{DATABASE}?unix_socket={urllib.parse.quote(str(self.socket), safe='')}"


def given_url(engine: str) -> str | None:
    """Return the URL of a server that the environment names instead of a private one, for example TEST_MARIADB_URL."""
    return os.environ.get(f"TEST_{re.sub(r'[^A-Z0-9]', '_', engine.upper())}_URL")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "django-mysqlqueue"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# -- installing ---------------------------------------------------------------


_APT = threading.Lock()
"""apt-get cannot run twice at the same time."""


def apt_install(packages: tuple[str, ...]) -> None:
    """Install packages that are missing, with sudo if needed.

    Raises:
        NotAvailable: The packages cannot be installed.
    """
    missing = [name for name in packages if not _installed(name)]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise NotAvailable(
            f"{', '.join(missing)} must be installed, but this system has no apt-get. Install them by hand, or set "
            "TEST_MARIADB_URL, TEST_MARIADB_10_11_URL and TEST_MYSQL_URL to servers of your own"
        )
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    if prefix and shutil.which("sudo") is None:
        raise NotAvailable(
            f"{', '.join(missing)} must be installed, but you are not root and sudo is missing. Run apt-get install "
            "yourself"
        )
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _APT:
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
        ):
            done = subprocess.run(
                [*prefix, *command], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            # "update" also fails if a third-party source is unreachable, which is harmless.
            if done.returncode and command[1] == "install":
                raise NotAvailable(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _installed(package: str) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "install ok installed"


def install(engine: str) -> None:
    """Download a server, and install the client that sets it up.

    Raises:
        NotAvailable: A package cannot be downloaded or installed.
    """
    apt_install(CLIENT_PACKAGES)
    server_folder(engine)


def browser() -> str:
    """Return Chromium's path: that in the environment variable CHROMIUM, or Debian's, which is installed if needed.

    Raises:
        NotAvailable: Chromium is missing.
    """
    given = os.environ.get("CHROMIUM")
    if given is None:
        apt_install(BROWSER_PACKAGES)
    path = given or CHROMIUM
    if not os.access(path, os.X_OK):
        raise NotAvailable(f"{path} does not exist: set CHROMIUM to the path of Chromium")
    return path


def java() -> str:
    """Return the path of Java 17 or later: that in JAVA_HOME, on PATH, or Debian's, which is installed if needed.

    Raises:
        NotAvailable: Java is missing or too old.
    """
    home = os.environ.get("JAVA_HOME")
    found = f"{home}/bin/java" if home else shutil.which("java")
    if found is None:
        apt_install(JAVA_PACKAGES)
        found = shutil.which("java")
    if found is None or not os.access(found, os.X_OK):
        raise NotAvailable("Java was not found: install version 17 or later, or set JAVA_HOME to its folder")
    said = subprocess.run([found, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < JAVA_VERSION:
        raise NotAvailable(f"{found} is older than Java {JAVA_VERSION} or not Java: {' '.join(said.splitlines()[:1])}")
    return found


def node() -> Path:
    """Return a folder in which Node.js finds its driver for MySQL. The driver is downloaded with npm at first.

    Raises:
        NotAvailable: Node.js or npm is missing, or the driver cannot be downloaded.
    """
    if not all(map(shutil.which, ("node", "npm"))):
        apt_install(NODE_PACKAGES)
    folder = cache_folder() / f"node-{NODE_DRIVER}"
    if not (folder / "node_modules" / "mysql2" / "package.json").exists():
        # Into another folder first: an interrupted download must not look complete.
        with tempfile.TemporaryDirectory(dir=cache_folder()) as work:
            command = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", work, NODE_DRIVER]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotAvailable(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(work, folder, symlinks=True)
    return folder


def faketime() -> Path:
    """Return libfaketime's library, which moves the clock of a server. It is installed if needed.

    Raises:
        NotAvailable: It is missing.
    """
    places = [Path("/usr/lib") / library / "faketime" / "libfaketimeMT.so.1" for _, library in LOADERS.values()]
    if not any(path.exists() for path in places):
        apt_install(CLOCK_PACKAGES)
    for path in places:
        if path.exists():
            return path
    raise NotAvailable("libfaketime was not found: install Debian's package libfaketime")


def promtool() -> Path:
    """Return the path of Prometheus's promtool: that on PATH, or Debian's, which is downloaded at first.

    Raises:
        NotAvailable: It is missing.
    """
    found = shutil.which("promtool")
    return Path(found) if found else _unpacked("promtool", PROMTOOL) / "root/usr/bin" / PROMTOOL.binary


PROGRAMS: dict[str, Callable[[], object]] = {"browser": browser, "java": java, "node": node, "promtool": promtool}
"""By name, what returns the program, and installs it if it is missing."""


def server_folder(engine: str) -> Path:
    """Return the folder with an unpacked server. It is downloaded at first."""
    return _unpacked(engine, BUILDS[engine])


def _unpacked(name: str, build: Build) -> Path:
    """Return the folder with an unpacked program.

    apt downloads the program and its libraries into the cache folder. Nothing is installed into the system.
    """
    folder = cache_folder() / name
    with open(cache_folder() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _fetch(folder, build)
    return folder


def _fetch(folder: Path, build: Build) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NotAvailable(f"{build.binary} is downloaded from Debian with apt-get and dpkg, which this system lacks")
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "apt"
    for name in ("state/lists/partial", "cache/archives/partial", "etc/sources"):
        (work / name).mkdir(parents=True)
    (work / "state/status").touch()
    (work / "etc/sources/suite.sources").write_text(_source(build.suite))
    options = [
        "-o", f"Dir::State={work}/state",
        "-o", f"Dir::State::status={work}/state/status",
        "-o", f"Dir::Cache={work}/cache",
        "-o", "Dir::Etc::SourceList=/dev/null",
        "-o", f"Dir::Etc::SourceParts={work}/etc/sources",
        "-o", "APT::Sandbox::User=",
        "-o", "Debug::NoLocking=1",
        "-o", "APT::Get::Assume-Yes=true",
    ]  # fmt: skip
    download = ["download"] if build.is_alone else ["install", "--download-only", "--no-install-recommends"]
    for command in (["update", "-qq"], [*download, "-qq", build.package]):
        done = subprocess.run(
            ["apt-get", *options, *command],
            cwd=work / "cache/archives",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise NotAvailable(f"apt-get {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    packages = sorted((work / "cache/archives").glob("*.deb"))
    if not packages:
        raise NotAvailable(f"apt-get downloaded nothing for {build.package} of {build.suite}")
    for package in packages:
        subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], check=True)
    shutil.rmtree(work)
    (folder / "complete").touch()


def _source(suite: str) -> str:
    """Return a sources entry for a suite, with the mirror that apt uses on this machine."""
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for place in places:
        if not place.is_file():
            continue
        for line in place.read_text().splitlines():
            found = re.match(r"(?:URIs:\s*|deb\s+(?:\[[^\]]*\]\s+)?)(https?://\S+/debian/?)(?:\s|$)", line.strip())
            if found:
                return f"Types: deb\nURIs: {found[1]}\nSuites: {suite}\nComponents: main\nSigned-By: {keyring}\n"
    raise NotAvailable("the apt sources of this machine contain no Debian mirror")


# -- running ------------------------------------------------------------------


@contextlib.contextmanager
def running(engine: str, *, extra: tuple[str, ...] = (), in_memory: bool = False) -> Iterator[Server]:
    """Start a private server and yield it. Stop it at the end of the block.

    Args:
        engine: one of ``BUILDS``.
        extra: additional options of its command line.
        in_memory: whether its files may be in memory, if there is enough: they are written in less time there.

    Raises:
        NotAvailable: The server cannot be installed or started.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"mysqlqueue-{engine}-", dir=MEMORY if in_memory and _has_memory() else None))
    server: Server | None = None
    try:
        command, setup, tables = (_mysql if engine == "mysql" else _mariadb)(engine, folder)
        with (folder / "server.log").open("wb") as log:
            done = subprocess.run([*command, *setup], input=tables, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise NotAvailable(f"{engine} {setup[0]} failed:\n{(folder / 'server.log').read_text(errors='replace')}")
        server = Server(engine.partition("-")[0], folder / "s", folder, (*command, *extra))
        server.start()
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _has_memory() -> bool:
    """Return whether the files of a few servers fit into memory."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = min(shutil.disk_usage(MEMORY).free, 1024 * int(found[1]) if found else 0)
        return os.access(MEMORY, os.W_OK) and free >= MEMORY_NEEDED
    return False


def _common_options(folder: Path) -> list[str]:
    return [
        f"--datadir={folder}/data",
        f"--socket={folder}/s",
        f"--pid-file={folder}/pid",
        f"--tmpdir={folder}",
        "--skip-networking",
        "--secure-file-priv=",
        "--max-connections=300",
        "--innodb-buffer-pool-size=256M",
        # The log is written at each commit but flushed to disk only once a second, which is safe as long as the host
        # survives. Benchmarks and the soak test override it.
        "--innodb-flush-log-at-trx-commit=2",
        *(["--user=root"] if os.geteuid() == 0 else []),
    ]


def _executable(engine: str) -> tuple[Path, list[str]]:
    """Return the folder with a server's files, and the command that runs it with its own libraries."""
    root = server_folder(engine) / "root"
    loader_name, library = LOADERS.get(platform.machine(), ("", ""))
    if not loader_name:
        raise NotAvailable(f"the architecture {platform.machine()!r} is not supported")
    name = BUILDS[engine].binary
    loader = next((path for path in root.rglob(loader_name) if path.is_file()), None)
    binary = next((path for path in root.rglob(name) if path.is_file()), None)
    if loader is None or binary is None:
        raise NotAvailable(f"the unpacked server in {root} lacks {loader_name} or {name}")
    libraries = ":".join(str(root / place / library) for place in ("usr/lib", "lib"))
    return root, [str(loader), "--library-path", libraries, str(binary), "--no-defaults"]


def _mariadb(engine: str, folder: Path) -> tuple[list[str], list[str], bytes]:
    """Return the command of a server, the options that create its tables, and the statements for that."""
    root, start = _executable(engine)
    # As mariadb-install-db does it, which cannot run a server with libraries of its own. Root needs no password.
    tables = [b"CREATE DATABASE IF NOT EXISTS mysql;\nUSE mysql;\nSET @auth_root_socket = NULL;\n"]
    scripts = ("m*_system_tables", "m*_performance_tables", "m*_system_tables_data", "maria_add_gis*", "m*_sys_schema")
    found = [next(root.glob(f"usr/share/*/{name}.sql"), None) for name in scripts]
    if None in found:
        raise NotAvailable(f"the unpacked server in {root} lacks one of {', '.join(scripts)}")
    tables += [script.read_bytes() for script in found if script is not None]
    share = next(script.parent for script in found if script is not None)
    (folder / "data" / "mysql").mkdir(parents=True)
    options = [
        f"--basedir={root}/usr",
        f"--lc-messages-dir={share}",
        f"--character-sets-dir={share}/charsets",
        f"--plugin-dir={root}/usr/lib/mysql/plugin",
        *_common_options(folder),
    ]
    return [*start, *options], ["--bootstrap"], b"\n".join(tables)


def _mysql(engine: str, folder: Path) -> tuple[list[str], list[str], bytes]:
    """Return the command of a server, and the option that creates its tables."""
    root, start = _executable(engine)
    options = [
        f"--basedir={root}/usr",
        f"--lc-messages-dir={root}/usr/share/mysql",
        "--mysqlx=OFF",
        *[
            option if not option.startswith("--secure-file-priv") else "--secure-file-priv=NULL"
            for option in _common_options(folder)
        ],
        "--sync-binlog=0",
    ]
    return [*start, *options], ["--initialize-insecure"], b""


def client() -> list[str]:
    """Return the command of the command-line client, without options of its configuration files."""
    found = shutil.which("mariadb") or shutil.which("mysql")
    if found is None:
        raise NotAvailable("the mariadb client is not installed. Run tools/servers.py install mariadb")
    return [found, "--no-defaults"]


def _client(server: Server, sql: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*client(), "-uroot", f"--socket={server.socket}", "-e", sql],
        capture_output=True,
        text=True,
        check=False,
    )


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    # Create the database only once: after a restart, MySQL would wait for the transactions of clients that have already
    # reconnected, and they for it.
    is_new = not (server.folder / "data" / DATABASE).exists()
    ask = f"CREATE DATABASE IF NOT EXISTS {DATABASE} CHARACTER SET utf8mb4" if is_new else "SELECT 1"
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            text = (server.folder / "server.log").read_text(errors="replace")
            raise NotAvailable(f"{server.engine} did not start:\n{text[-4000:]}")
        if server.socket.exists() and _client(server, ask).returncode == 0:
            return
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_servers_on_sigterm() -> None:
    """Exit cleanly at SIGTERM, so that private servers are stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def main() -> int:
    end_servers_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="install missing packages")
    installing.add_argument(
        "engines", nargs="+", choices=(*BUILDS, "driver", *PROGRAMS), help="what the packages are for"
    )
    serving = commands.add_parser("run", help="run a command with a private server")
    serving.add_argument("engine", choices=BUILDS, help="the server")
    serving.add_argument("arguments", nargs="+", metavar="COMMAND", help="the command and its arguments, after --")
    options = parser.parse_args()
    try:
        if options.command == "install":
            for name in options.engines:
                if name == "driver":
                    apt_install(DRIVER_PACKAGES)
                elif name in PROGRAMS:
                    PROGRAMS[name]()
                else:
                    install(name)
            return 0
        with running(options.engine) as server:
            env = {**os.environ, "DATABASE_URL": server.url}
            return subprocess.run(options.arguments, env=env, check=False).returncode
    except NotAvailable as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
