"""Plain decoding by llama.cpp, in a process of its own.

Run as a script, by an interpreter that has the package xllamacpp: it imports nothing of this repository. For each line
on standard input it decodes, and prints the milliseconds per token.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROMPT = "The history of the city of Rome begins with a legend. " * 4
TOKENS = 32


class LlamaPeer:
    """llama.cpp on a GGUF file.

    Args:
        python: an interpreter that has xllamacpp.
        file: the model.
        threads: of its computation.
    """

    def __init__(self, python: Path, file: Path, threads: int) -> None:
        command = [str(python), __file__, str(file), str(threads)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self()  # loads the model

    def __call__(self) -> float:
        """Seconds per token."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"llama.cpp ended with status {self._process.wait()}: is xllamacpp installed there?")
        return float(answer) / 1000

    def close(self) -> None:
        self._process.communicate()


def _main(file: str, threads: int) -> None:
    import xllamacpp  # type: ignore[import-not-found,unused-ignore]

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = file, 1024, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    request = {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True}
    for _ in sys.stdin:
        print(server.handle_completions(request)["timings"]["predicted_per_token_ms"], flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
