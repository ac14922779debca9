"""Tokenisation without torch: pieces, offsets, hidden tokens, decoders that look at the neighbours."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from onlinerl.errors import ModelError
from onlinerl.text.codec import Codec
from tests.gateways import CODEC, MODEL

EOS = CODEC.eos_ids[0]


def stream(codec: Codec, prompt: list[int], ids: list[int]) -> tuple[list[str], list[int], str]:
    """(pieces, length after each token, whole text)."""
    decoder = codec.decoder(prompt)
    pieces, lengths = [], []
    for id in ids:
        pieces.append(decoder.push(id))
        lengths.append(sum(map(len, pieces)))
    pieces.append(decoder.end())
    return pieces, lengths, "".join(pieces)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """A small tokenizer of SentencePiece's kind: ▁ for spaces, byte fallback, a first space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        "▁def",
        "▁return",
        "▁x",
        "def",
        "x",
        "y",
        "=",
        "(",
        ")",
        ":",
        "\n",
        "r",
        "e",
        "t",
        "u",
        "n",
    ]
    pieces += ["▁<PRE>", "▁<SUF>", "▁<MID>"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: place for place, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>"])
    return saved(tokenizer, tmp_path_factory.mktemp("metaspace"), eos="</s>")


def saved(tokenizer: Tokenizer, folder: Path, *, eos: str, **config: object) -> Codec:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512, **config}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return Codec.open(folder)


def test_what_the_models_files_say() -> None:
    assert CODEC.eos_ids == (CODEC.added["<|endoftext|>"],)
    assert (CODEC.context, CODEC.size) == (2048, 8192)
    assert CODEC.added["<|fim_middle|>"] in CODEC.hidden
    assert CODEC.encode("<|fim_prefix|>a") == [CODEC.added["<|fim_prefix|>"], *CODEC.encode("a")]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 8182), max_size=30))
def test_any_ids_stream_to_what_a_whole_decode_gives(ids: list[int]) -> None:
    _, lengths, text = stream(CODEC, [], ids)
    whole = CODEC.tokenizer.decode(ids)
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}  # bytes of an incomplete character at the end
    assert lengths == sorted(lengths)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_of_any_script_comes_whole(text: str) -> None:
    ids = CODEC.encode(text)
    if not any(id in CODEC.hidden for id in ids):
        pieces, lengths, out = stream(CODEC, [], ids)
        assert out == CODEC.tokenizer.decode(ids)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
        assert not lengths or lengths[-1] == len(out)


def test_a_character_of_four_tokens_appears_once_with_its_last() -> None:
    ids = [id for byte in "🜁".encode() for id in [_byte_id(byte)]]
    pieces, lengths, _ = stream(CODEC, [], ids)
    assert pieces == ["", "", "", "🜁", ""]
    assert lengths == [0, 0, 0, 1]
    assert stream(CODEC, [], ids[:3])[2] == ""  # never completed: left out, not a replacement character
    assert CODEC.token_text(ids[0]) == "bytes:\\xf0"


def _byte_id(byte: int) -> int:
    return next(id for id in range(8183) if CODEC._bytes is not None and CODEC._bytes[id] == bytes([byte]))


def test_special_tokens_are_hidden_and_ids_beyond_the_vocabulary_are_silent() -> None:
    ids = [*CODEC.encode("a b"), CODEC.added["<|fim_pad|>"], 8191, 10**6, *CODEC.encode(" c"), EOS]
    assert stream(CODEC, [], ids)[2] == "a b c"


def test_markers_that_the_tokenizer_does_not_call_special_are_hidden_too(tmp_path: Path) -> None:
    raw = json.loads((MODEL / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] == "<|endoftext|>"  # as in Qwen2.5-Coder's own files
    codec = saved(Tokenizer.from_str(json.dumps(raw)), tmp_path, eos="<|endoftext|>")
    assert stream(codec, [], [*codec.encode("x"), codec.added["<|fim_suffix|>"]])[2] == "x"


def test_decode_then_encode_is_not_the_identity() -> None:
    ids = [id for letter in "return x" for id in CODEC.encode(letter)]
    assert stream(CODEC, [], ids)[2] == "return x"
    assert CODEC.encode("return x") != ids


def test_a_leading_space_survives_a_decoder_that_strips_it(metaspace: Codec) -> None:
    ids = metaspace.tokenizer.get_vocab().__getitem__
    answer = [ids("▁return"), ids("▁x"), ids("▁"), ids("▁x"), ids("\n")]
    assert metaspace.tokenizer.decode(answer).startswith("return")
    prompt = metaspace.encode("def x():")
    pieces, lengths, text = stream(metaspace, prompt, answer)
    assert text == " return x  x\n"
    assert pieces[:2] == [" return", " x"]
    assert lengths[-1] == len(text)
    whole = metaspace.tokenizer.decode([*prompt, *answer])
    assert whole == metaspace.tokenizer.decode(prompt) + text


def test_byte_fallback_gives_whole_characters(metaspace: Codec) -> None:
    ids = metaspace.tokenizer.get_vocab().__getitem__
    prompt = metaspace.encode("x =")
    answer = [ids(f"<0x{byte:02X}>") for byte in "é€".encode()]
    pieces, lengths, text = stream(metaspace, prompt, answer)
    assert text == "é€"
    assert pieces == ["", "é", "", "", "€", ""]
    assert lengths == [0, 1, 1, 1, 2]
    assert stream(metaspace, prompt, answer[:-1])[2] == "é"


def test_random_answers_of_a_context_dependent_decoder(metaspace: Codec) -> None:
    rng = random.Random(3)
    shown = [id for id in range(metaspace.size) if id not in metaspace.hidden and id > 258]
    prompt = metaspace.encode("def x():\n")
    for _ in range(200):
        answer = [rng.choice(shown) for _ in range(rng.randrange(1, 20))]
        whole = metaspace.tokenizer.decode([*prompt, *answer])
        assert metaspace.tokenizer.decode(prompt) + stream(metaspace, prompt, answer)[2] == whole


def test_word_pieces_too(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "def": 1, "##ault": 2, "x": 3, "[SEP]": 4}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    codec = saved(tokenizer, tmp_path, eos="[SEP]")
    assert stream(codec, [3], [1, 2, 3, 4])[2] == " default x"


def test_several_ends_from_several_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    saved(tokenizer, tmp_path, eos="<|endoftext|>", eos_token_id=8189)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8190, 8183]}))
    assert Codec.open(tmp_path).eos_ids == (8190, 8183, 8189)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Codec.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        Codec.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text((MODEL / "tokenizer.json").read_text())
    for broken in ("{", "[]"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(ModelError, match=r"config\.json"):
            Codec.open(tmp_path)
