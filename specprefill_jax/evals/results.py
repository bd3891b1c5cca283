"""A file of results: JSON lines that are only ever added to, and survive being cut off at any byte."""

import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specprefill_jax.errors import SpecPrefillError, argument_error

UNREPEATABLE = ("timings",)
"""Fields of a row that differ from run to run; `comparable` leaves them out. All others are the same for the same
samples, settings, models, versions and machine, however often the run was interrupted."""


def comparable(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what differs from run to run."""
    return {key: value for key, value in row.items() if key not in UNREPEATABLE}


def row_key(row: Mapping[str, Any]) -> str:
    """What a row is of: one sample, read in one way."""
    return "/".join(str(row[part]) for part in ("benchmark", "task", "bucket", "key", "setting"))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file one by one, of a .gz as well; a last line that was cut off is passed over.

    Raises:
        SpecPrefillError: a line before the last is no JSON object, or a .gz is damaged.
    """
    try:
        for row, _ in _rows(path):
            yield row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SpecPrefillError(f"{path}: not a whole gzip file: {error}") from error


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows, each with the offset of its end in the file."""
    end, bad = 0, 0
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if bad:
                raise SpecPrefillError(f"{path}, line {bad}: not a JSON object, and not the last line")
            row = _row(line)
            if row is None:
                bad = number  # what an interrupted write left, if nothing follows
                continue
            end += len(line)
            yield row, end


def _row(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class ResultFile:
    """Adds rows to a file, each safely on disk before the next; one process at a time.

        with ResultFile(path, about) as results:
            if key not in results.done:
                results.add(row)

    Where the file is new, `about` is written beside it (`<name>.about.json`); where it is there, `about` must be the
    same, since the rows of two different runs do not belong together.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, write: bool = True) -> None:
        """Name the file; nothing is touched yet.

        Args:
            path: the file, made with its folder where it is not there.
            about: what all its rows have in common; JSON-ready.
            write: False for a process that takes part in the work but leaves the file to another.
        """
        self.path = path
        self.about = json.loads(json.dumps(about))
        self.write = write
        self.done: set[str] = set()
        """Keys of the rows that are there, see `row_key`."""
        self._file: int | None = None

    @property
    def about_path(self) -> Path:
        """Where `about` is."""
        return self.path.with_suffix(".about.json")

    def __enter__(self) -> Self:
        """Open the file, drop a torn last line, and learn what is done.

        Raises:
            ArgumentError: it holds rows of a run with another `about`.
            SpecPrefillError: another process writes to it, or it is damaged before its last line.
        """
        if self.write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                self._lock()
                self._check_about()
                end = self._learn()
                if os.fstat(self._file).st_size > end:
                    os.ftruncate(self._file, end)
                    os.fsync(self._file)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        elif self.path.exists():
            self._learn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file, which gives up the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; when this returns, it is on disk."""
        self.done.add(row_key(row))
        if self._file is None:
            return
        line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def _learn(self) -> int:
        """Remember which rows are there; return where the last of them ends."""
        end = 0
        for row, offset in _rows(self.path):
            self.done.add(row_key(row))
            end = offset
        return end

    def _lock(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SpecPrefillError(f"{self.path}: another process is writing to it") from None

    def _check_about(self) -> None:
        """Write `about`, whole or not at all, or compare it with what is there."""
        try:
            there = json.loads(self.about_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            unfinished = self.about_path.with_suffix(".tmp")
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump(self.about, file, indent=1, ensure_ascii=False)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.about_path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            return
        except ValueError as error:
            raise SpecPrefillError(f"{self.about_path}: not JSON: {error}") from error
        for key in sorted(there.keys() | self.about.keys()):
            if there.get(key) != self.about.get(key):
                allowed = f"{there.get(key)!r}, as in the run whose rows are in {self.path}; or name another folder"
                raise argument_error(key, self.about.get(key), allowed)
