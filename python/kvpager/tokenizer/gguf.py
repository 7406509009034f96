"""The tokenizer that a GGUF file describes in its ``tokenizer.…`` fields, built with the tokenizers library.

The file names its pre-tokenizer and does not spell it out, so those of the supported families stand here, as their
published ``tokenizer.json`` have them.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from kvpager.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`
# How texts are cut before merging; the families differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _byte_level(*before: pre_tokenizers.PreTokenizer, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*before, last])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", digits)), behavior="isolated")
    return _byte_level(split, use_regex=False)


_PRE_TOKENIZERS = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama-bpe": lambda: _words("{1,3}"),
    "qwen2": lambda: _words(""),
    "deepseek-r1-qwen": lambda: _words(""),
}


def tokenizer_from_fields(fields: Mapping[str, Any]) -> tuple[HuggingFaceTokenizer, dict[str, str], str | None]:
    """Tokenizer, special tokens by name, chat template.

    Raises:
        ConfigError: no tokenizer in the fields, or one of another kind.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
    if kind != "gpt2" or not tokens or merges is None:
        raise ConfigError(f"`tokenizer.ggml.model` is {kind}; supported: gpt2 (byte-level BPE) with tokens and merges")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(f"`tokenizer.ggml.pre` is {pre}; supported: {', '.join(_PRE_TOKENIZERS)}")
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    tokenizer = HuggingFaceTokenizer(BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    if pre.endswith(("qwen2", "qwen")):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = ByteLevelDecoder()
    types = fields.get("tokenizer.ggml.token_type") or []
    for wanted, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, its_type in zip(tokens, types, strict=False) if its_type == wanted]
        tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in added])
    special = {
        f"{name}_token": tokens[place]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (place := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None and place < len(tokens)
    }
    _add_marks(tokenizer, fields, special, adds_bos=pre == "llama-bpe")
    template = fields.get("tokenizer.chat_template")
    return tokenizer, special, template if isinstance(template, str) else None


def _add_marks(
    tokenizer: HuggingFaceTokenizer, fields: Mapping[str, Any], special: Mapping[str, str], *, adds_bos: bool
) -> None:
    """Has the marks put around a text that the file asks for; Llama 3 has its begin-of-text where nothing is said."""
    bos = special.get("bos_token") if fields.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = special.get("eos_token") if fields.get("tokenizer.ggml.add_eos_token", False) else None
    marks = [mark for mark in (bos, eos) if mark is not None]
    if marks:
        pieces = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        numbers = [(mark, tokenizer.token_to_id(mark)) for mark in marks]
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=numbers)
