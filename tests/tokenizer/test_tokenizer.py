"""Text to ids and back, in pieces and at once; chat templates."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from kvpager.errors import ArgumentError, ConfigError
from kvpager.loader import BUNDLED_MODEL
from kvpager.tokenizer import IncrementalDecoder, Tokenizer

TOKENIZER = Tokenizer.from_folder(BUNDLED_MODEL)
# The tokens that stand for one byte each.
BYTE_TOKENS = {
    TOKENIZER.token_bytes(token): token for token in range(2047, 2, -1) if len(TOKENIZER.token_bytes(token)) == 1
}


def deltas(*parts: bytes) -> list[str]:
    """What is streamed for these parts, each pushed byte token by byte token; then what is left at the end."""
    decoder = IncrementalDecoder(TOKENIZER.token_bytes)
    pieces = ["".join(decoder.push(BYTE_TOKENS[bytes([byte])]) for byte in part) for part in parts]
    return [*pieces, decoder.finish()]


def decode_at_once(data: bytes) -> str:
    return TOKENIZER.decode(BYTE_TOKENS[bytes([byte])] for byte in data)


def test_every_byte_has_a_token() -> None:
    assert len(BYTE_TOKENS) == 256


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((b"\xf0\x9f", b"\x98\x80"), ["", "😀", ""]),
        ((b"\xe4", b"\xb8", b"\x96"), ["", "", "世", ""]),
        ((b"\xe4\xb8",), ["", "\ufffd"]),
        ((b"\xff", b"a"), ["\ufffd", "a", ""]),
    ],
)
def test_b118_characters_split_over_tokens(parts: tuple[bytes, ...], expected: list[str]) -> None:
    assert deltas(*parts) == expected
    assert decode_at_once(b"".join(parts)) == "".join(expected)


@given(st.binary(max_size=24))
def test_b118_deltas_of_any_bytes_join_to_the_decoded_text(data: bytes) -> None:
    assert "".join(deltas(*(bytes([byte]) for byte in data))) == decode_at_once(data)


@given(st.lists(st.integers(0, 2047), max_size=24))
def test_b118_deltas_of_any_tokens_join_to_the_decoded_text(token_ids: list[int]) -> None:
    decoder = IncrementalDecoder(TOKENIZER.token_bytes)
    pieces = [decoder.push(token) for token in token_ids]
    assert "".join([*pieces, decoder.finish()]) == TOKENIZER.decode(token_ids)


@given(st.text(max_size=40))
def test_text_survives_the_round_trip(text: str) -> None:
    assume("<|" not in text)  # special tokens are not shown
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_special_tokens_are_encoded_and_not_shown() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert TOKENIZER.decode(ids) == "user\nhi"
    assert TOKENIZER.token_bytes(1) == b""
    assert TOKENIZER.token_bytes(10**6) == b""


def folder_with(tmp_path: Path, **settings: object) -> Path:
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


USER = [{"role": "user", "content": "What is a list?"}]


def test_the_bundled_chat_template() -> None:
    text = TOKENIZER.apply_chat_template([{"role": "system", "content": "Be short."}, *USER])
    assert text == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is a list?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert TOKENIZER.apply_chat_template(USER, add_generation_prompt=False).endswith("<|im_end|>\n")
    with pytest.raises(ArgumentError, match=r"`messages`: .* unknown role: judge"):
        TOKENIZER.apply_chat_template([{"role": "judge", "content": ""}])


def test_templates_find_what_they_expect(tmp_path: Path) -> None:
    """Loop controls, trimmed blocks, special tokens, extra variables, unescaped JSON, dates, namespaces."""
    template = """
    {%- set ns = namespace(count=0) %}
    {%- for message in messages %}
      {%- if message.role == 'system' %}{% continue %}{% endif %}
      {%- set ns.count = ns.count + 1 %}
      {{- bos_token + {'text': message.content} | tojson }}
    {%- endfor %}
    {{- ns.count ~ (' think' if enable_thinking else '') ~ (tools is none) ~ strftime_now('%Y')[:2] ~ eos_token }}
    """
    folder = folder_with(tmp_path, chat_template=template, bos_token={"content": "<b>"}, eos_token="<e>")
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "<ö>"}]
    text = Tokenizer.from_folder(folder).apply_chat_template(messages, enable_thinking=True)
    assert text.strip() == '<b>{"text": "<ö>"}1 thinkTrue20<e>'


def test_blocks_leave_no_blank_lines(tmp_path: Path) -> None:
    """Published templates count on it: a block alone on its line leaves nothing behind. Slices and methods work."""
    template = """{% for message in messages[::-1] %}
  {% if message.content is string and loop.index0 == 0 %}
{{ message.content.split('</think>')[-1].lstrip('\\n') }}
  {% endif %}
{% endfor %}
"""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\n</think>\n\nb"}]
    assert Tokenizer.from_folder(folder_with(tmp_path, chat_template=template)).apply_chat_template(messages) == "b\n"


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "of the list"}]
    folder = folder_with(tmp_path, chat_template=named)
    assert Tokenizer.from_folder(folder).apply_chat_template(USER) == "of the list"
    (folder / "chat_template.jinja").write_text("of the file")
    assert Tokenizer.from_folder(folder).apply_chat_template(USER) == "of the file"


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (None, ConfigError),
        ("{% if %}", ConfigError),
        ("{{ messages.append(1) }}", ArgumentError),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", ArgumentError),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", ArgumentError),
        ("{{ namespace(__init__=1) }}", ArgumentError),
        ("{{ messages[0].content + 1 }}", ArgumentError),
        ("{{ raise_exception('no') }}", ArgumentError),
    ],
)
def test_bad_templates_are_typed_errors(tmp_path: Path, template: str | None, error: type[Exception]) -> None:
    """A template is foreign code: it can neither reach Python nor change what it is given."""
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, chat_template=template))
    assert tokenizer.has_chat_template == (template is not None)
    messages = [*USER]
    with pytest.raises(error):
        tokenizer.apply_chat_template(messages)
    assert messages == USER


def test_tokenizers_that_are_not_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer.json; give prompts as token ids"):
        Tokenizer.from_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"decoder": {"type": "Metaspace"}}))
    with pytest.raises(ConfigError, match=r"has a decoder of type Metaspace; supported: ByteLevel"):
        Tokenizer.from_folder(tmp_path)
    path.write_text(json.dumps({"decoder": {"type": "ByteLevel"}}))
    with pytest.raises(ConfigError, match="is no sound tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_in_a_sequence_is_found(tmp_path: Path) -> None:
    content = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Return a string")) == "Return a string"


def test_f211_stored_truncation_and_padding_are_reset(tmp_path: Path) -> None:
    content = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "Return a list of the names in the current local scope"
    assert Tokenizer.from_folder(tmp_path).encode(text) == TOKENIZER.encode(text)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}A:{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}",
        "{%- for m in messages -%}\nA:{%- generation -%} {{ m.content }} {%- endgeneration -%}!{%- endfor -%}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% endgeneration %}{{ x }}",
    ],
)
def test_f212_a_generation_tag_changes_nothing(tmp_path: Path, template: str) -> None:
    bare = re.sub(r"\{%(-?) (end)?generation (-?)%\}", r"{%\1 if true \3%}", template, count=1)
    bare = re.sub(r"\{%(-?) endgeneration (-?)%\}", r"{%\1 endif \2%}", bare)
    tagged, plain = (
        Tokenizer.from_folder(folder_with(tmp_path, chat_template=each)).apply_chat_template(USER)
        for each in (template, bare)
    )
    assert tagged == plain
    assert "What is a list?" in tagged


@pytest.mark.parametrize(("text", "special"), [("naïve", False), ("¡ñ", True), ("a b", False), ("世界", False)])
def test_f221_an_added_token_decodes_to_its_own_text(tmp_path: Path, text: str, special: bool) -> None:
    content = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    token = max(content["model"]["vocab"].values()) + 1
    content["added_tokens"].append(
        {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": special}
    )  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    (found,) = tokenizer.encode(text)
    assert found == token
    assert tokenizer.token_bytes(token, skip_special_tokens=False) == text.encode()
    assert tokenizer.decode([token], skip_special_tokens=False) == tokenizer.token_text(token) == text
    assert tokenizer.decode([token]) == ("" if special else text)


def test_f224_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(ArgumentError, match="`text`: wanted text without lone surrogates, got one at character 1"):
        TOKENIZER.encode("a\ud800")


def test_decode_is_the_librarys_for_tokens_of_the_alphabet() -> None:
    library = HuggingFaceTokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    for ids in ([5, 9, 300, 1, 2047, 77], list(range(3, 2048))):
        for skip in (True, False):
            assert TOKENIZER.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)
