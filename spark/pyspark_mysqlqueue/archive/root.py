"""Where an archive is: a local folder, or a store that Delta's Python library supports."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.fs
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler

from pyspark_mysqlqueue.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Root:
    """The root of an archive: a folder, or a URI such as ``s3://bucket/folder``.

    The credentials of a store are not in the URI. They come from the environment (``AWS_ACCESS_KEY_ID``,
    ``AWS_ENDPOINT_URL`` …) or from the machine's role.
    """

    uri: str

    def __post_init__(self) -> None:
        """Make a folder's path absolute, because workers may run in another folder.

        Raises:
            PipelineError: The URI contains a password or parameters, or has the form ``file:/path``, or the path
                contains a percent sign or a backslash.
        """
        parts = urlsplit(self.uri)
        if "://" not in self.uri or parts.scheme == "file":
            if parts.scheme == "file" and "://" not in self.uri:
                raise PipelineError(f"archive {self.uri!r}: use a path, or a URI that begins with file://")
            path = unquote(parts.path) if parts.scheme == "file" else self.uri
            object.__setattr__(self, "uri", str(Path(path).absolute()))
            for character in "%\\":
                if character in self.uri:
                    raise PipelineError(
                        f"archive {self.uri!r}: Delta's library supports no {character!r} in a folder's path"
                    )
        elif parts.password is not None:
            raise PipelineError(
                f"archive {parts.scheme}://…: the URI has a password, which Spark would pickle and print; configure it "
                "in the environment"
            )
        elif parts.query or parts.fragment:
            raise PipelineError(
                f"archive {self.uri!r}: a URI has no '?' and no '#'; set AWS_REGION, AWS_ENDPOINT_URL and others "
                "in the environment"
            )

    @property
    def is_local(self) -> bool:
        """Whether the archive is in a folder of this machine."""
        return "://" not in self.uri

    def open(self) -> Folder:
        """Connect to the file system.

        Raises:
            PipelineError: The scheme is not supported.
        """
        if self.is_local:
            return Folder(pyarrow.fs.LocalFileSystem(), f"{self.uri}/", is_local=True)
        try:
            return Folder(pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.uri)), "", is_local=False)
        except Exception as error:
            raise PipelineError(f"archive {self.uri!r}: {error}") from error

    def spark_path(self, relative: str) -> str:
        """Return a path for Spark, which expects it without percent-encoding and with glob characters escaped."""
        # Hadoop calls the scheme s3 s3a.
        root = f"file://{self.uri}" if self.is_local else re.sub(r"^s3://", "s3a://", self.uri.rstrip("/"))
        return re.sub(r"([\\{}\[\]*?])", r"\\\1", f"{root}/{relative}")


@dataclass(frozen=True)
class Folder:
    """An open root."""

    filesystem: Any
    prefix: str
    """What the file system wants before a path below the root."""
    is_local: bool

    @contextlib.contextmanager
    def create(self, relative: str) -> Iterator[Any]:
        """Create a file and flush it to disk at the end of the block: the table must not outlive its files."""
        full = self.prefix + relative
        if not self.is_local:
            with self.filesystem.open_output_stream(full) as stream:
                yield stream
            return
        existing = next(one for one in Path(full).parents if one.is_dir())
        Path(full).parent.mkdir(parents=True, exist_ok=True)
        with open(full, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        for parent in Path(full).parents:
            sync(parent)
            if parent == existing:
                break

    def read(self, relative: str) -> pq.ParquetFile:
        """Open a file for reading."""
        return pq.ParquetFile(self.prefix + relative, filesystem=self.filesystem, page_checksum_verification=True)

    def sizes(self, relative: Sequence[str]) -> list[int]:
        """Return the sizes of files in bytes, in one request; -1 for a file that does not exist."""
        found = self.filesystem.get_file_info([self.prefix + one for one in relative])
        return [-1 if one.size is None else int(one.size) for one in found]


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
