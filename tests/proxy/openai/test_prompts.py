"""How long a prompt is and how it begins, whatever images and sounds are in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.balancing.prefix_cache import BLOCK_BYTES, MAX_BLOCKS
from launcher.proxy.openai.body import read_body
from launcher.proxy.openai.prompts import MEDIA_BYTES, TEXT_BYTES, MediaFinder, Prompt, read_prompt


def test_the_text_is_long_enough_for_every_block() -> None:
    assert TEXT_BYTES >= BLOCK_BYTES * MAX_BLOCKS


def prompt_of(**fields: bytes) -> Prompt:
    return read_prompt({name: memoryview(raw) for name, raw in fields.items()})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'[{"image_url":{"url":"data:image/png;base64,', b'"}},{"text":"what is it?"}]'),
        (b'[{"type":"input_image","image_url": "data:,', b'"}]'),
        (b'[{"input_audio":{"format":"wav","data": "', b'"}}]'),
        (b'[{"source":{"type":"base64","data":"', b'"}}]'),
    ],
)
def test_an_image_counts_as_a_fixed_size(before: bytes, after: bytes) -> None:
    def prompt(medium: bytes) -> bytes:
        return before + medium + after

    some, same, other = (prompt_of(messages=prompt(char * 10**6)) for char in (b"A", b"A", b"B"))
    assert some == same != other
    assert some.media
    assert some.size == len(some.text) == len(before) + MEDIA_BYTES + len(after)
    assert bytes(some.text).startswith(before)
    assert bytes(some.text).endswith(after)
    assert prompt_of(messages=prompt(b"A" * (10**6 + 1))) != some
    small = prompt(b"A" * MEDIA_BYTES)
    assert prompt_of(messages=small) == Prompt(memoryview(small), len(small))
    two = prompt_of(messages=prompt(b"A" * 10**6) + prompt(b"A" * 10**5))
    assert bytes(two.text).startswith(bytes(some.text))
    assert two.size == 2 * some.size


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'[";base64,' + b"x" * 9999,
        b'["a \\"data\\": \\"' + b"x" * 9999 + b'"]',
        b'{"data":"',
        b'{"data":"' + b"x" * 9999,
        b'[{"text":"data:image/png;base64,' + b"x" * 9999 + b'"}]',  # the model reads it as it is
        b'[{"source":{"type":"text","data":"' + b"some words " * 999 + b'"}}]',
        b'[{"url":"https://' + b"x" * 9999 + b'"}]',
        b'"data:image/png;base64,' + b"x" * 9999 + b'"',
    ],
)
def test_text_is_unchanged(text: bytes) -> None:
    assert prompt_of(messages=text) == Prompt(memoryview(text), len(text))


def test_large_texts_are_not_copied() -> None:
    text = b'[{"content":"' + b"words and more " * 1000 + b'"}]'
    same = prompt_of(messages=text).text
    assert isinstance(same, memoryview)
    assert same.obj is text
    medium = b'[{"data":"' + b"A" * 9999 + b'"}]'
    long = prompt_of(messages=medium, input=bytes(5 * TEXT_BYTES))
    assert len(long.text) == TEXT_BYTES
    assert long.size == 5 * TEXT_BYTES + MEDIA_BYTES + 13


def test_a_prompt_has_all_its_fields_in_order() -> None:
    assert prompt_of(system=b'"be brief"', messages=b"[]") == Prompt(b'"be brief"[]', 12)
    instructed = read_body(b'{"input":"b","messages":"no","instructions":"a"}', ("instructions", "input"))
    assert read_prompt(instructed.prompt) == Prompt(b'"a""b"', 6)


@pytest.mark.parametrize("line", [b"cch=1a2b3;", b'cch=00000; \\"quoted\\"'])
def test_an_agents_hash_of_the_request_is_not_part_of_the_prompt(line: bytes) -> None:
    """Claude Code's first line of `system` changes with each request; vLLM leaves it out."""

    def system(said: bytes) -> bytes:
        return b'[{"type":"text","text":"%b"},{"type":"text","text":"You are"}]' % said

    header = b"x-anthropic-billing-header: cc_version=2.1; " + line
    assert prompt_of(system=system(header)).text == system(b"")
    assert prompt_of(system=system(header), messages=b"[]") == prompt_of(system=system(b""), messages=b"[]")
    kept = b'"' + header + b'"'  # a plain text is kept, and so is what a user says
    assert prompt_of(system=kept).text == kept
    assert prompt_of(messages=system(header)).text == system(header)


@given(
    st.lists(st.sampled_from([b'"url":"data:a/b,', b'"data" : "', b'"', b"A" * 1500, b"A" * 5000, b"\\"]), max_size=12),
    st.integers(1, 4000),
)  # fmt: skip
def test_media_are_found_while_the_text_grows(parts: list[bytes], step: int) -> None:
    text = b"".join(parts)
    whole, grown = MediaFinder(), MediaFinder()
    whole.feed(text, len(text))
    for end in (*range(0, len(text), step), len(text)):
        grown.feed(text, end)
    assert grown.spans == whole.spans
