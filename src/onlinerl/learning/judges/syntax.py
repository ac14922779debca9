"""Does a file still parse once the completion is in it? Asked of real parsers, about windows of files.

Python goes to this interpreter's own parser: tree-sitter takes a wrong indentation for a right one, and most
of what breaks Python is indentation. A window is no module, so it gets a frame first, in which the author's
text parses; the completion is then judged in the same frame. Where no frame is found, and for all other
languages, tree-sitter counts the errors that are not the author's.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tree_sitter import Language, Node, Parser

from onlinerl.datasets.fim import FimPrompt

GRAMMARS: Mapping[str, str] = MappingProxyType(
    {
        "c": "tree_sitter_c",
        "cpp": "tree_sitter_cpp",
        "go": "tree_sitter_go",
        "java": "tree_sitter_java",
        "javascript": "tree_sitter_javascript",
        "python": "tree_sitter_python",
        "ruby": "tree_sitter_ruby",
        "rust": "tree_sitter_rust",
    }
)
"""Module of each language's grammar; only Python's is a dependency, the others are used where installed.
A table, because the language stands in the data, and data may not name modules to import."""

CUTS = 12
"""How often a window is cut to find a frame. Of the standard library's windows of 2,048 characters 94 % have
one, and there the verdict is that of the whole file; with the others it is in 98 to 99 of 100 cases, where
tree-sitter alone, which lets a wrong indentation pass, was wrong about 70 of 100 lines that were wrongly
indented."""


def parses(prompt: FimPrompt, completion: str) -> bool | None:
    """Whether the text around the cursor parses with the completion as it does with the author's middle;
    None when nothing that knows the language is installed.

    Python's verdict is that of this interpreter's version.
    """
    frame = _frame(prompt) if prompt.language == "python" else None
    if frame is not None:
        return _syntax_error(frame.head + frame.prefix + completion + frame.suffix) is None
    if _parser(prompt.language) is None:
        return None
    return _errors(prompt.language, prompt.prefix + completion + prompt.suffix) <= _authors_errors(prompt)


# ------------------------------------------------------------------------------------------ Python


@dataclass(frozen=True, slots=True)
class Frame:
    """A piece of a Python window that is a module with the author's middle in it."""

    head: str
    """`if` lines that open the blocks in which the piece begins."""
    prefix: str
    suffix: str


@functools.lru_cache(maxsize=8192)
def _frame(prompt: FimPrompt) -> Frame | None:
    """Cut the window where the parser complains until it does not, at most CUTS times.

    A window begins in the middle of a function, of a docstring or of a bracket, and ends in one; the parser
    names the line, so whatever is before it, or from it on, goes. The cursor's own lines never do.
    """
    prefix, suffix = prompt.prefix, prompt.suffix
    for _ in range(CUTS):
        text = prefix + prompt.middle + suffix
        head = _head(text.split("\n"))
        line = _syntax_error(head + text)
        if line is None:
            return Frame(head, prefix, suffix)
        line -= head.count("\n")
        before = prefix.count("\n")
        last = (prefix + prompt.middle).count("\n") + 1
        if line <= before:
            if before == 0:
                return None
            prefix = prefix.split("\n", max(line, 1))[-1]
        elif line > last:
            rest = suffix.split("\n")
            # The parser may name the line after the last one, as where a block has no body.
            kept = "\n".join(rest[: min(line - last, len(rest) - 1)]).rstrip() + "\n"
            if kept == suffix or len(rest) == 1:
                return None
            suffix = kept
        else:
            return None
    return None


def _head(lines: Sequence[str]) -> str:
    """Openers for the blocks that the lines close without having opened them."""
    levels: list[int] = []
    least: int | None = None
    for line in lines:
        code = line.lstrip()
        if not code or code.startswith("#"):
            continue
        indentation = len(line) - len(code)
        if least is None or indentation < least:
            least = indentation
            levels.append(indentation)
    if least:
        levels.append(0)
    return "".join(f"{' ' * level}if 1:\n" for level in reversed(levels[1:]))


def _syntax_error(text: str) -> int | None:
    """Line of the first syntax error, from 1; 0 when the parser names none; None when there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape sequence is a warning, and no error
            ast.parse(text)
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return 0  # NUL characters and lone surrogates; nesting beyond the parser's stack
    return None


# -------------------------------------------------------------------------------------- tree-sitter


@functools.lru_cache(maxsize=8192)
def _authors_errors(prompt: FimPrompt) -> int:
    return _errors(prompt.language, prompt.prefix + prompt.middle + prompt.suffix)


@functools.cache
def _parser(language: str) -> Parser | None:
    module = GRAMMARS.get(language)
    if module is None or importlib.util.find_spec(module) is None:
        return None
    return Parser(Language(importlib.import_module(module).language()))


def _errors(language: str, text: str) -> int:
    """Nodes that the parser made up or could not place."""
    parser = _parser(language)
    assert parser is not None
    waiting: list[Node] = [parser.parse(text.encode("utf-8", "replace")).root_node]
    count = 0
    while waiting:
        node = waiting.pop()
        count += node.is_error or node.is_missing
        if node.has_error:
            waiting.extend(node.children)
    return count
