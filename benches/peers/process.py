"""Our end of a comparator: a script of this folder that runs under another Python and answers in lines of JSON."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


class Peer:
    """A worker, started at once and idle until it is asked; `with` ends it.

    Args:
        python: the interpreter of the environment that the worker needs.
        script: a file of this folder.
        environment: variables added to ours.

    Raises:
        PeerError: the worker ended before it was ready; the text has the end of what it said.
    """

    def __init__(self, python: Path, script: str, environment: dict[str, str] | None = None) -> None:
        self.name = Path(script).stem
        self._said = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - open as long as the worker
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._process = subprocess.Popen(
            [python, FOLDER / script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env={**inherited, **(environment or {})},
        )  # fmt: skip
        self.about = self._reply()
        self.pid = self._process.pid

    def ask(self, request: str, **arguments: Any) -> Any:
        """What the worker's function `request` returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._said.seek(0)
        raise PeerError(f"{self.name} ended with status {self._process.returncode}:\n{self._said.read()[-3000:]}")

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()  # the worker's loop ends with its input
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class PeerError(RuntimeError):
    """A comparator failed."""


def vllm_peer(python: Path | None, script: str, **environment: str) -> Peer | None:
    """A worker under the Python of vLLM's environment, or None after saying why there is none."""
    if python is None:
        print("vLLM is left out: `--vllm-python` names no interpreter (benches/README.md says how to make one)")
        return None
    if not python.exists():
        print(f"vLLM is left out: there is no {python}")
        return None
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    try:
        peer = Peer(python, script, {**quiet, **environment})
    except PeerError as error:
        print(f"vLLM is left out: {error}")
        return None
    print(f"beside it: {peer.about}", flush=True)
    return peer
