"""Fill-in-the-middle templates: found from the vocabulary, put, and read back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.text import templates
from onlinerl.text.templates import CODELLAMA, CODESTRAL, DEEPSEEK, QWEN, STARCODER, TEMPLATES, Template
from tests.gateways import CODEC

_markers = sorted(templates.MARKERS | {"<PRE> ", " <SUF>", " <MID>"})
texts = st.text(max_size=60).filter(lambda text: not any(marker.strip() in text for marker in _markers))


def find(tokens: Sequence[str]) -> Template | None:
    return templates.find(lambda token: tokens.index(token) if token in tokens else None)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda one: one.name)
def test_found_by_the_tokens_a_model_has(template: Template) -> None:
    assert find(template.markers) is template


def test_none_without_all_markers() -> None:
    assert find(["<|fim_prefix|>", "<|fim_suffix|>"]) is None
    assert find([]) is None


def test_the_built_in_model_has_qwens() -> None:
    assert templates.find(CODEC.tokenizer.token_to_id) is QWEN
    rendered = CODEC.encode(QWEN.render("def f(", "):"))
    assert (rendered[0], rendered[-1]) == (CODEC.added["<|fim_prefix|>"], CODEC.added["<|fim_middle|>"])


def test_what_the_families_documents_say() -> None:
    assert STARCODER.render("P", "S") == "<fim_prefix>P<fim_suffix>S<fim_middle>"
    assert DEEPSEEK.render("P", "S") == "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>"
    assert CODESTRAL.render("P", "S") == "[SUFFIX]S[PREFIX]P"
    assert CODELLAMA.parse("<PRE> P <SUF>S <MID>") == ("P", "S")


@given(prefix=texts, suffix=texts, template=st.sampled_from(TEMPLATES))
def test_what_was_put_is_read_back(prefix: str, suffix: str, template: Template) -> None:
    assert template.parse(template.render(prefix, suffix)) == (prefix, suffix)


@given(text=st.text(max_size=80), template=st.sampled_from(TEMPLATES))
def test_any_text_can_be_asked(text: str, template: Template) -> None:
    parts = template.parse(text)
    assert parts is None or all(part in text for part in parts)
    template.path(text)


def test_plain_text_is_no_template() -> None:
    assert QWEN.parse("def f():") is None
    assert QWEN.parse("<|fim_prefix|>a<|fim_suffix|>b") is None
    assert QWEN.parse("<|fim_suffix|>a<|fim_prefix|>b<|fim_middle|>") is None


def test_snippets_of_other_files_are_no_part_of_the_prefix() -> None:
    inside = (
        "<|fim_prefix|><|file_sep|>a.py\nimport a\n<|file_sep|>src/b.py\ndef f(<|fim_suffix|>):<|fim_middle|>"
    )
    assert QWEN.parse(inside) == ("def f(", "):")
    assert QWEN.path(inside) == "src/b.py"
    before = (
        "<|repo_name|>r\n<|file_sep|>a.py\nimport a\n<|file_sep|>src/b.rs\n"
        "<|fim_prefix|>fn f(<|fim_suffix|>)<|fim_middle|>"
    )
    assert QWEN.parse(before) == ("fn f(", ")")
    assert QWEN.path(before) == "src/b.rs"
    assert QWEN.path("<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>") == ""


def test_markers_in_the_file_itself_do_not_break_it() -> None:
    prompt = QWEN.render('MARK = "<|fim_prefix|>"\nx = ', "\n")
    parts = QWEN.parse(prompt)
    assert parts is not None
    assert parts[1] == "\n"
    assert 'MARK = "<|fim_prefix|>"\nx = '.endswith(parts[0])


def test_languages() -> None:
    assert templates.language("a\\b\\C.PYI") == "python"
    assert templates.language("x.tsx") == "typescript"
    assert templates.language("") == ""
