"""Chat templates: a conversation as the text that the model was trained to see, through jinja2's sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvpager.errors import ArgumentError, ConfigError

Message = Mapping[str, Any]


def render_chat(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """The text of a conversation.

    Args:
        template: jinja2 source, as published models bring it.
        messages: ``{"role": …, "content": …}`` each, oldest first.
        variables: what else the template may name.

    Raises:
        ConfigError: the template can't be parsed.
        ArgumentError: the template refuses these messages.
    """
    try:
        compiled = _template_environment().from_string(template)
    except TemplateError as error:
        raise ConfigError(f"the model's chat template can't be parsed: {error}") from error
    try:
        return compiled.render({"tools": None, "documents": None, **variables}, messages=messages)
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        raise ArgumentError("messages", "a conversation that the chat template accepts", error) from error


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja with what published chat templates rely on. A template is foreign code: it runs in the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _SafeNamespace
    environment.globals["dict"] = _new_dict
    return environment


class _GenerationTag(Extension):
    """``{% generation %}`` marks an assistant's words for training; its body is rendered as without the tag."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 wants a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
