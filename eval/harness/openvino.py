"""OpenVINO GenAI as a baseline: it decodes the same GGUF file in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmspec.errors import UserError, explained
from mmspec.eval.harness.peers import Completion, gguf_file

LOOKUP = "lookup"


class OpenVino:
    """A pipeline of OpenVINO GenAI on the CPU, with its own default precision.

    Args:
        model: a GGUF file, or a name that stands for one.
        threads: of prefill and decoding.
        speculation: ``"lookup"``, its prompt lookup, with 5 candidates after 3 tokens, as in its documentation; empty
            for plain decoding.

    Raises:
        UserError: it is not installed or cannot read the weights, the model is not a GGUF file, or the speculation is
            another.
    """

    def __init__(self, model: str, threads: int, speculation: str = "") -> None:
        file = gguf_file("OpenVINO", model)
        if speculation not in ("", LOOKUP):
            raise UserError(f"openvino's speculation must be {LOOKUP}: got {speculation!r}")
        try:
            import openvino
            import openvino_genai
        except ImportError as error:
            raise UserError("the method openvino needs OpenVINO GenAI: run pip install 'mmspec[peers]'") from error
        self._tensor = openvino.Tensor
        self._lookup = {"num_assistant_tokens": 5, "max_ngram_size": 3} if speculation else {}
        options: dict[str, Any] = {"prompt_lookup": True} if speculation else {}
        with explained(f"OpenVINO cannot load {file}", RuntimeError):
            self._pipeline = openvino_genai.LLMPipeline(file, "CPU", INFERENCE_NUM_THREADS=threads, **options)

    def complete(self, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool = False) -> Completion:
        """Decode a prompt of token ids; every request pays for its prefill."""
        config = self._pipeline.get_generation_config()
        wanted = {"max_new_tokens": max_new_tokens, "do_sample": False, "ignore_eos": ignore_eos, **self._lookup}
        for name, value in wanted.items():
            setattr(config, name, value)
        result = self._pipeline.generate(self._tensor(np.array([prompt], dtype=np.int64)), config)
        (tokens,), times = result.tokens, result.perf_metrics
        milliseconds = times.get_generate_duration().mean - times.get_ttft().mean
        return Completion(list(tokens), milliseconds / 1000)
