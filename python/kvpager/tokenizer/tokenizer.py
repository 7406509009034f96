"""Text to token ids and back: `tokenizer.json` of a folder or the fields of a GGUF file, by the tokenizers library.

Byte-level BPE only: its tokens are runs of bytes, so that text can be put together byte by byte (`text.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

from kvpager.config import read_json
from kvpager.errors import ArgumentError, ConfigError
from kvpager.tokenizer.chat import Message, render_chat
from kvpager.tokenizer.gguf import tokenizer_from_fields


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: each byte has a printable stand-in, itself where it is printable already."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


class Tokenizer:
    """The tokenizer and the chat template of a model.

    Args:
        tokenizer: of the tokenizers library; byte-level.
        special_tokens: ``bos_token``, ``eos_token`` … → text: templates name them.
        chat_template: jinja2 source; None: the model has none.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        tokenizer.no_truncation()  # both belong to the program that stored the file, not to the model
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, value in added.items() if value.special)
        self._added_bytes = {token: str(value.content).encode() for token, value in added.items()}
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """From ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises:
            ConfigError: no ``tokenizer.json``, a damaged one, or one that is not byte-level.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"`{folder}` has no tokenizer.json; give prompts as token ids")
        decoder = read_json(path).get("decoder") or {}
        kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
        if "ByteLevel" not in kinds:
            raise ConfigError(f"`{path}` has a decoder of type {kinds[0]}; supported: ByteLevel")
        try:
            tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"`{path}` is no sound tokenizer: {error}") from error
        settings_path = folder / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.is_file() else {}
        return cls(tokenizer, _special_tokens(settings), _chat_template(folder, settings))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """From the fields of a GGUF file, ``tokenizer.…`` among them.

        Raises:
            ConfigError: no tokenizer in them, or one that is not byte-level.
        """
        return cls(*tokenizer_from_fields(fields))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the marks that the model's tokenizer puts around a text.

        Raises:
            ArgumentError: the text holds a lone surrogate, which UTF-8 can't hold.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            place = next((at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if place is None:
                raise
            raise ArgumentError("text", "text without lone surrogates", f"one at character {place}") from None

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, special tokens left out or not; bytes that are no UTF-8 become U+FFFD."""
        parts = [self.token_bytes(token, skip_special_tokens=skip_special_tokens) for token in token_ids]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token stands for; none for an id that has no token, or a special one that is skipped."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        added = self._added_bytes.get(token_id)  # stored as plain text; the others in the byte-level alphabet
        if added is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return str(token).encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token, special or not, looked at alone; U+FFFD for a part of a character."""
        return self.token_bytes(token_id, skip_special_tokens=False).decode("utf-8", "replace")

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return self._chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation as the model was trained to see it; encode it without special tokens.

        Args:
            messages: ``{"role": …, "content": …}`` each, oldest first.
            add_generation_prompt: whether the text ends where the assistant's answer begins.
            variables: more variables of the template, e.g. ``enable_thinking`` of Qwen3's.

        Raises:
            ConfigError: the model has no chat template, or one that can't be parsed.
            ArgumentError: the template refuses these messages.
        """
        if self._chat_template is None:
            raise ConfigError("this model has no chat template (tokenizer_config.json or chat_template.jinja)")
        named = {**self._special_tokens, **variables, "add_generation_prompt": add_generation_prompt}
        return render_chat(self._chat_template, messages, named)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token`` …: templates name them. Stored as text or as an object with ``content``."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None
