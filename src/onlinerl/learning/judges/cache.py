"""Scores that were paid for once: one JSON object a line, only ever appended to."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from onlinerl.errors import JudgeError, SettingsError


def digest(*parts: object) -> str:
    """Key of a score: SHA-256 of what it depends on, in hex."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class ScoreCache:
    """Integer scores by key, in memory and in a file that several processes may append to.

    A line is written by one unbuffered write, so that `kill -9` can tear no line but the last. Torn and
    foreign lines are left alone and not believed.
    """

    def __init__(self, path: Path | None) -> None:
        """None keeps the scores in memory alone. Raises SettingsError when the file cannot be used."""
        self.path = path
        self._scores: dict[str, int] = {}
        self._torn = False
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                file.seek(0)
                for line in file:
                    self._torn = not line.endswith(b"\n")
                    self._believe(line)
        except OSError as error:
            raise SettingsError(f"the judge's cache {path} cannot be used: {error.strerror}") from None

    def _believe(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            return
        if isinstance(row, dict) and isinstance(row.get("key"), str) and type(row.get("score")) is int:
            self._scores[row["key"]] = row["score"]

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: str) -> int | None:
        """The score, None when it is not known."""
        return self._scores.get(key)

    def put(self, key: str, score: int) -> None:
        """Keep a score. Raises JudgeError when it cannot be written: it would be paid for again."""
        self._scores[key] = score
        if self.path is None:
            return
        line = json.dumps({"key": key, "score": score}) + "\n"
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, ("\n" + line if self._torn else line).encode())
            finally:
                os.close(file)
        except OSError as error:
            raise JudgeError(f"the judge's cache {self.path} cannot be written: {error.strerror}") from None
        self._torn = False
