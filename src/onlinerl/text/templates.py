"""Fill-in-the-middle prompts: which markers a model knows, how they are put, and how they are read back.

A template is data. A model has the first one whose markers are all single tokens of its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class Template:
    """Markers of one family of models.

    >>> QWEN.render("def f(", "):")
    '<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>'
    >>> QWEN.parse("<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>")
    ('def f(', '):')
    """

    name: str
    prefix: str
    suffix: str
    middle: str
    """"" where the answer follows the prefix at once."""
    suffix_first: bool = False
    """The order is suffix, prefix (Codestral) instead of prefix, suffix."""
    file: str = ""
    """Marker before a file's path, where the family has one; the path ends at the line's end."""
    others: tuple[str, ...] = ()
    """More special tokens of the family that never belong into shown text."""
    written: tuple[str, str, str] | None = None
    """The markers as people write them, where that differs from the vocabulary; read, never made."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All special tokens of the family."""
        named = (self.prefix, self.suffix, self.middle, self.file, *self.others)
        return tuple(marker for marker in named if marker)

    def render(self, prefix: str, suffix: str) -> str:
        """The prompt that asks for what stands between `prefix` and `suffix`."""
        if self.suffix_first:
            return f"{self.suffix}{suffix}{self.prefix}{prefix}{self.middle}"
        return f"{self.prefix}{prefix}{self.suffix}{suffix}{self.middle}"

    def parse(self, prompt: str) -> tuple[str, str] | None:
        """(prefix, suffix) of a prompt in this template, else None.

        Snippets of other files before the cursor's file are no part of the prefix.
        """
        parts = self._split(prompt)
        if parts is None:
            return None
        prefix, suffix = parts
        path = self._path_end(prefix)
        return (prefix[path[1] :] if path else prefix), suffix

    def path(self, prompt: str) -> str:
        """Path of the file that the cursor is in, where the prompt tells it, else ""."""
        if not self.file:
            return ""
        parts = self._split(prompt)
        found = self._path_end(parts[0]) if parts else None
        if found is None and parts is not None and not self.suffix_first:
            head = prompt[: prompt.rfind(self.prefix)]
            found = self._path_end(head if head.endswith("\n") else f"{head}\n")
        return found[0] if found else ""

    def _split(self, prompt: str) -> tuple[str, str] | None:
        for before, after, end in ((self.prefix, self.suffix, self.middle), self.written or ("", "", "")):
            if not before or not prompt.endswith(end):
                continue
            body = prompt[: len(prompt) - len(end)]
            first, second = (after, before) if self.suffix_first else (before, after)
            # the last markers are the client's; earlier ones may be text of the file itself
            cut = body.rfind(second)
            start = body.rfind(first, 0, cut) if cut >= 0 else -1
            if start < 0:
                continue
            one, two = body[start + len(first) : cut], body[cut + len(second) :]
            return (two, one) if self.suffix_first else (one, two)
        return None

    def _path_end(self, text: str) -> tuple[str, int] | None:
        start = text.rfind(self.file) if self.file else -1
        end = text.find("\n", start) if start >= 0 else -1
        return (text[start + len(self.file) : end].strip(), end + 1) if end >= 0 else None


QWEN = Template(
    name="qwen",
    prefix="<|fim_prefix|>",
    suffix="<|fim_suffix|>",
    middle="<|fim_middle|>",
    file="<|file_sep|>",
    others=("<|fim_pad|>", "<|repo_name|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)
"""Qwen 2.5 Coder and later, CodeGemma, and the built-in model."""
STARCODER = Template(
    name="starcoder",
    prefix="<fim_prefix>",
    suffix="<fim_suffix>",
    middle="<fim_middle>",
    file="<file_sep>",
    others=("<fim_pad>", "<repo_name>", "<reponame>", "<filename>"),
)
"""StarCoder, StarCoder 2, Granite Code, StableCode."""
DEEPSEEK = Template(
    name="deepseek", prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>"
)
"""DeepSeek Coder and its second version."""
CODELLAMA = Template(
    name="codellama",
    prefix="▁<PRE>",
    suffix="▁<SUF>",
    middle="▁<MID>",
    others=("▁<EOT>",),
    written=("<PRE> ", " <SUF>", " <MID>"),
)
"""CodeLlama 7B and 13B."""
CODESTRAL = Template(name="codestral", prefix="[PREFIX]", suffix="[SUFFIX]", middle="", suffix_first=True)
"""Codestral and Mistral's later coders."""

TEMPLATES = (QWEN, STARCODER, DEEPSEEK, CODELLAMA, CODESTRAL)
MARKERS = frozenset(marker for template in TEMPLATES for marker in template.markers)
"""Special tokens that are hidden from clients even where a tokenizer does not call them special."""


def find(token_id: Callable[[str], int | None]) -> Template | None:
    """The template of a model, by what its tokenizer knows; None when it has none.

    token_id: from a token's text to its id, None when the vocabulary lacks it.
    """
    for template in TEMPLATES:
        needed = (template.prefix, template.suffix, template.middle)
        if all(token_id(marker) is not None for marker in needed if marker):
            return template
    return None


LANGUAGES = {
    ".c": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cs": "csharp",
    ".css": "css",
    ".go": "go",
    ".h": "c",
    ".hpp": "cpp",
    ".html": "html",
    ".java": "java",
    ".js": "javascript",
    ".json": "json",
    ".jsx": "javascript",
    ".kt": "kotlin",
    ".lua": "lua",
    ".md": "markdown",
    ".php": "php",
    ".py": "python",
    ".pyi": "python",
    ".rb": "ruby",
    ".rs": "rust",
    ".scala": "scala",
    ".sh": "shell",
    ".sql": "sql",
    ".swift": "swift",
    ".ts": "typescript",
    ".tsx": "typescript",
    ".yaml": "yaml",
    ".yml": "yaml",
}


def language(path: str) -> str:
    """Language of a file by its name's ending, "" when unknown.

    >>> language("src/app.PY"), language("Makefile")
    ('python', '')
    """
    return LANGUAGES.get(PurePosixPath(path.replace("\\", "/")).suffix.lower(), "")
