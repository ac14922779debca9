"""Which texts are pieces of one file, or of copies of it, where no path says so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

RUN = 5
"""Lines of code that are compared as one."""
WINDOW = 4
"""Of so many overlapping runs one is kept."""
_COMMENTS = ("#", "//", "/*", "*", "--", "'''", '"""')


def groups(texts: Sequence[str]) -> list[int]:
    """For each text the number of its group: the index of the group's first text.

    Two texts are in one group when they are equal, when they share RUN + WINDOW − 1 = 8 lines of code in a
    row (blank lines, comments, brackets alone and indentation aside), or when a chain of such texts joins
    them. Shorter shared runs are found in part.

    Runs are chosen by winnowing [Schleimer, Wilkerson and Aiken 2003], so that 0.4 of them are enough.
    """
    parents = list(range(len(texts)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    seen: dict[bytes, int] = {}
    for index, text in enumerate(texts):
        for mark in (_hash(f"whole\0{text}"), *fingerprints(text)):
            one, other = sorted((root(index), root(seen.setdefault(mark, index))))
            parents[other] = one
    return [root(index) for index in range(len(texts))]


def fingerprints(text: str) -> Iterator[bytes]:
    """Hashes of some of the text's runs of RUN lines; the same run gives the same hash in every text.

    >>> lines = [f"value_{number} = {number}" for number in range(20)]
    >>> whole = {*fingerprints("\\n".join(lines))}
    >>> bool(whole & {*fingerprints("\\n".join(["import a", *lines[4:12], "b()"]))})
    True
    >>> whole & {*fingerprints("\\n".join([*lines[4:8], "b()", *lines[9:12]]))}
    set()
    """
    lines = [line.strip() for line in text.split("\n")]
    code = [line for line in lines if any(map(str.isalnum, line)) and not line.startswith(_COMMENTS)]
    # The first and the last line of a text may be cut: they are not compared.
    runs = [_hash("\n".join(code[at : at + RUN])) for at in range(1, len(code) - RUN)]
    last = -1
    for start in range(len(runs) - WINDOW + 1):
        least = min(range(start, start + WINDOW), key=lambda at: (runs[at], -at))
        if least != last:
            last = least
            yield runs[least]


def _hash(text: str) -> bytes:
    # Not Python's own hash: that differs between processes, and a split must not.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
