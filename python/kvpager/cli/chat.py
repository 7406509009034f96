"""`kvpager chat`: a conversation on the terminal, each answer shown as it comes.

The whole conversation is the prompt of every turn; what earlier turns computed is found in the prefix cache, so a turn
costs the new words only. An empty line is ignored; `/clear` forgets the conversation; `/exit` or Ctrl-D ends it; any
other single word behind a slash is taken for a mistyped command. Ctrl-C ends an answer, which stays in the conversation
as far as it got.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from rich.console import Console
from rich.text import Text

from kvpager.engine import LLM
from kvpager.errors import SequenceTooLongError
from kvpager.kinds import is_text
from kvpager.sampling import SamplingParams

_COMMAND = re.compile(r"/\w*")  # one word; a path or a sentence that begins with a slash goes to the model


def converse(
    llm: LLM, params: SamplingParams, lines: Iterable[str], console: Console, *, system: str | None = None
) -> list[dict[str, str]]:
    """Answers line after line until there are no more, or one says ``/exit``.

    Args:
        llm: the engine; its model has a chat template.
        params: of every answer.
        lines: what the user says.
        console: where answers go.
        system: what the model is told first.

    Returns:
        The conversation.

    Raises:
        ConfigError: the model has no tokenizer or no chat template.
    """
    beginning = [{"role": "system", "content": system}] if system else []
    messages = [*beginning]
    for line in lines:
        text = line.strip()
        if not is_text(text):  # bytes that are no UTF-8 come as lone surrogates
            console.print("(that line is no UTF-8 and was not read)", style="yellow")
        elif text == "/exit":
            break
        elif text == "/clear":
            messages = [*beginning]
            console.print("(forgotten)", style="dim")
        elif _COMMAND.fullmatch(text):
            console.print(f"(no command {text}; there are /clear and /exit)", style="yellow", markup=False)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(llm, params, messages, console)
            except SequenceTooLongError as error:
                messages.pop()
                console.print(f"(the conversation has grown too long: {error}; /clear forgets it)", style="yellow")
                continue
            messages.append({"role": "assistant", "content": answer})
    return messages


def _answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]], console: Console) -> str:
    events: Any = llm.stream(llm.encode_chat(messages), params)  # a generator: closing it ends its request
    pieces: list[str] = []
    try:
        for event in events:
            pieces.append(event.text)
            console.print(Text(event.text), end="", soft_wrap=True)
            console.file.flush()
    except KeyboardInterrupt:
        console.print(" …", end="")
    finally:
        events.close()
    console.print()
    return "".join(pieces)


def typed_lines(ask: Callable[[str], str]) -> Iterable[str]:
    """Lines as a person types them, until the end of the input; Ctrl-C at the prompt ends it too.

    Bytes that are no UTF-8 come as lone surrogates, as in `piped_lines`.
    """
    while True:
        try:
            yield ask("> ")
        except UnicodeDecodeError as error:
            yield bytes(error.object).decode("utf-8", "surrogateescape")
        except (EOFError, KeyboardInterrupt):
            return


def piped_lines(stream: BinaryIO) -> Iterable[str]:
    """Lines of a file or a pipe; bytes that are no UTF-8 come as lone surrogates: one bad line costs no other."""
    for line in stream:
        yield line.decode("utf-8", "surrogateescape")
