"""Text to token ids and back: `tokenizer.json` through the tokenizers library, chat templates through jinja2.

`IncrementalDecoder` is the streaming half. Byte-level BPE tokens are runs of bytes, so it joins bytes, not texts: a
character that is split over tokens comes out with its last byte, never as a replacement character, and the pieces
joined equal `Tokenizer.decode` of all ids. O(bytes of the token) per call.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer as HuggingFaceTokenizer

from kvpager.config import read_json
from kvpager.errors import ArgumentError, ConfigError

Message = Mapping[str, Any]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: each byte has a printable stand-in, itself where it is printable already."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


class Tokenizer:
    """The tokenizer and the chat template of a model folder.

    Raises:
        ConfigError: no ``tokenizer.json``, a damaged one, or one that is not byte-level.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"`{folder}` has no tokenizer.json; give prompts as token ids")
        decoder = read_json(path).get("decoder") or {}
        kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
        if "ByteLevel" not in kinds:
            raise ConfigError(f"`{path}` has a decoder of type {kinds[0]}; supported: ByteLevel")
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"`{path}` is no sound tokenizer: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, value in added.items() if value.special)
        settings_path = folder / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.is_file() else {}
        self._special_tokens = _special_tokens(settings)
        self._chat_template = _chat_template(folder, settings)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the marks that the model's tokenizer puts around a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids; special tokens are left out, bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for a special token or an id that has no token."""
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token is stored as plain text
            return str(token).encode()

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder brings a chat template."""
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
            ConfigError: the folder has no chat template, or a template that can't be parsed.
            ArgumentError: the template refuses these messages.
        """
        if self._chat_template is None:
            raise ConfigError("this model has no chat template (tokenizer_config.json or chat_template.jinja)")
        environment = _template_environment()
        try:
            template = environment.from_string(self._chat_template)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template can't be parsed: {error}") from error
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            return template.render(context, messages=messages, add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError("messages", "a conversation that the chat template accepts", error) from error


class IncrementalDecoder:
    """Turns one sequence's tokens into text as they come."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes: empty while a character is still short of bytes."""
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: one U+FFFD for a character that never got its last byte, else nothing."""
        return self._utf8.decode(b"", final=True)


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


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja with what published chat templates rely on. A template is foreign code: it runs in the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _SafeNamespace
    environment.globals["dict"] = _new_dict
    return environment


class _SafeNamespace(Namespace):
    """A namespace whose attributes can't be made to reach Python's internals: no leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise TemplateError(f"a namespace attribute may not start with an underscore: {name}")
        super().__setitem__(name, value)


@pass_context
def _new_dict(_context: Context, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(wanted: str) -> str:
    return datetime.now().strftime(wanted)
