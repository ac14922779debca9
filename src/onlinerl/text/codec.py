"""Between text and token ids, without torch: prompts in, pieces of answers out.

What is recorded and learned from are the ids that were served; text is only shown. Nothing here ever
encodes an answer again, since decode-then-encode is not the identity for real tokenizers.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from onlinerl.errors import ModelError
from onlinerl.text.templates import MARKERS

_SEED_TOKENS = 6
"""Prompt tokens that a context-dependent decoder sees before the answer."""
_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """Turns the ids of one answer into text, as they come."""

    def push(self, token: int) -> str:
        """Text that became certain with `token`; "" while a character is still incomplete."""
        ...

    def end(self) -> str:
        """Text held back that turns out to be text after all.

        A character whose last bytes never came is left out: it would put a replacement character into
        somebody's file.
        """
        ...


@dataclass(frozen=True)
class Codec:
    """Tokenizer of one model, and what its files say about ends and lengths."""

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    """Tokens that end an answer; () when the model's files name none."""
    context: int
    """Longest prompt plus answer that the model's files allow, in tokens; 0 when they do not say."""
    size: int
    """Ids are smaller than this."""
    hidden: frozenset[int]
    """Special tokens: sampled and recorded, never shown."""
    longest: int
    """Characters of the longest token: what bounds a text that fits into the context."""
    added: dict[str, int]
    """Added tokens, special or not, by their text."""
    _bytes: tuple[bytes, ...] | None = field(repr=False)
    """Each token's bytes, for byte-level vocabularies; None where decoding depends on the neighbours."""

    @classmethod
    def open(cls, directory: Path) -> Codec:
        """Read tokenizer.json, config.json, generation_config.json and tokenizer_config.json.

        Raises ModelError when the folder has no tokenizer.json or a file is broken.
        """
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{directory} has no tokenizer.json; give a model with a fast tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  translated: tokenizers raises nothing narrower
            raise ModelError(f"{file} is not a tokenizer: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read(directory / "config.json")
        generation = _read(directory / "generation_config.json")
        settings = _read(directory / "tokenizer_config.json")
        inner = config.get("text_config")
        config = {**config, **inner} if isinstance(inner, dict) else config
        added = tokenizer.get_added_tokens_decoder()
        eos: dict[int, None] = {}
        for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, int) and not isinstance(one, bool):
                    eos[one] = None
        name = settings.get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        last = tokenizer.token_to_id(name) if isinstance(name, str) else None
        if last is not None:
            eos[last] = None
        lengths = (config.get(key) for key in ("max_position_embeddings", "n_positions", "n_ctx"))
        context = next((value for value in lengths if isinstance(value, int) and value > 0), 0)
        hidden = {id for id, token in added.items() if token.special or token.content in MARKERS}
        known = tokenizer.get_vocab_size(with_added_tokens=True)
        size = config.get("vocab_size")
        return cls(
            tokenizer=tokenizer,
            eos_ids=tuple(eos),
            context=context,
            size=size if isinstance(size, int) and size > 0 else known,
            hidden=frozenset(hidden | set(eos)),
            longest=max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1),
            added={token.content: id for id, token in added.items()},
            _bytes=_byte_table(tokenizer, {id: token.content for id, token in added.items()}),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; special tokens written out in it become single ids."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` with every special token written out, for prompts given as ids."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def decoder(self, prompt_ids: Sequence[int]) -> Decoder:
        """A decoder for one answer to the prompt."""
        if self._bytes is not None:
            return _ByteDecoder(self._bytes, self.hidden)
        shown = [id for id in prompt_ids[-64:] if id not in self.hidden][-_SEED_TOKENS:]
        return _WindowDecoder(self.tokenizer, self.hidden, shown)

    def token_text(self, token: int) -> str:
        """One token by itself, for `logprobs`: `bytes:\\x..` where it is a part of a character."""
        if self._bytes is not None and 0 <= token < len(self._bytes):
            raw = self._bytes[token]
            try:
                return raw.decode("utf-8")
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return ""
        return str(name).replace("▁", " ")


class _ByteDecoder:
    """For byte-level vocabularies: each token is a string of bytes whatever stands around it."""

    __slots__ = ("_hidden", "_table", "_utf8")

    def __init__(self, table: tuple[bytes, ...], hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        # a model's head is often wider than its vocabulary: such ids have no text
        if token in self._hidden or not 0 <= token < len(self._table):
            return ""
        return self._utf8.decode(self._table[token])

    def end(self) -> str:
        self._utf8.reset()
        return ""


class _WindowDecoder:
    """For decoders whose output depends on the neighbours (Metaspace, byte fallback, WordPiece).

    Decodes a short window with and without the new token and takes the difference, the way vLLM does;
    the window starts in the prompt, so that an answer's leading space is not lost.
    """

    __slots__ = ("_hidden", "_ids", "_read", "_start", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], seed: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids = list(seed)
        self._start = 0
        self._read = len(self._ids)

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _difference(self) -> str:
        before = self._text(self._ids[self._start : self._read])
        return self._text(self._ids[self._start :])[len(before) :]

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        new = self._difference()
        if not new or new.endswith(_REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return new

    def end(self) -> str:
        return self._difference().rstrip(_REPLACEMENT)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value


def _byte_table(tokenizer: Tokenizer, added: dict[int, str]) -> tuple[bytes, ...] | None:
    """Bytes of each id when the decoder is ByteLevel alone, else None."""
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    if not decoder or decoder.get("type") != "ByteLevel":
        return None
    alphabet = _byte_alphabet()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id in vocabulary.items():
        if id in added or any(character not in alphabet for character in token):
            table[id] = token.encode("utf-8")
        else:
            table[id] = bytes(alphabet[character] for character in token)
    return tuple(table)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    extra = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(extra)})
    return alphabet
