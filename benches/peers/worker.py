"""A comparator's end of the pipe. Knows nothing of kvpager: it runs in an environment that does not have it."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(load: Callable[[], tuple[str, dict[str, Callable[..., Any]]]]) -> None:
    """Answers requests until the input ends.

    Args:
        load: imports what takes long; returns what it is, in words, and the functions that may be asked for.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not come between the replies

    def reply(answer: object) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    about, functions = load()
    reply(about)
    for line in sys.stdin:
        arguments = json.loads(line)
        reply(functions[arguments.pop("request")](**arguments))
