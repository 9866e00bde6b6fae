"""llama.cpp through the wheel `xllamacpp`: its own server in this process, fed with tokens and timed by itself."""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

__all__ = ["LlamaCpp"]


class LlamaCpp:
    """A GGUF file behind `slots` slots, each with room for so many tokens.

    With `exact` keys and values are cached and attended to in float32; by default as llama.cpp chooses, in float16.

    Seconds are those that llama.cpp counts itself, without what handing over requests takes.
    """

    def __init__(self, path: Path, *, slots: int, tokens: int, threads: int, exact: bool = False) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx = slots, slots * tokens
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        if exact:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        # Nothing is looked for, kept or printed besides what is asked.
        params.fit_params = params.warmup = params.ctx_shift = False
        params.n_ctx_checkpoints = params.cache_ram_mib = 0
        params.verbosity = -1
        self._slots = slots
        self._server = xllamacpp.Server(params)

    def log_probabilities(self, prompt: Sequence[int], vocabulary: int) -> list[float]:
        """Of every token that could follow."""
        answer = self._answer(prompt, 1, vocabulary)
        found = {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}
        return [found[token] for token in range(vocabulary)]

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The tokens after a prompt."""
        return cast(list[int], self._answer(prompt, tokens)["tokens"])

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Seconds for a prompt."""
        return float(self._answer(prompt, 1)["timings"]["prompt_ms"]) / 1e3

    def step_s(self, tokens: int) -> float:
        """Seconds for one token more in every slot at once."""
        with ThreadPoolExecutor(self._slots) as pool:
            answers = pool.map(lambda slot: self._answer([slot + 1], tokens), range(self._slots))
            # The first token is the prompt's: what is counted is from there to the last.
            seconds = [float(a["timings"]["predicted_ms"]) / 1e3 / (tokens - 1) for a in answers]
            return statistics.median(seconds)

    def _answer(self, prompt: Sequence[int], tokens: int, probabilities: int = 0) -> dict[str, Any]:
        request = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "verbose": True,
        }
        answer = self._server.handle_completions(request | ({"logprobs": probabilities} if probabilities else {}))
        return cast(dict[str, Any], answer["__verbose"])
