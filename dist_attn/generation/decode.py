"""Tokens after a prompt: prefill in blocks, then one step of the recurrent state for each token."""

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np
import torch

from dist_attn.errors import InputError
from dist_attn.generation.captured_step import CapturedStep, StepMode, takes_captured_steps
from dist_attn.generation.sampling import generator_for, sample
from dist_attn.model_config.figures import tokens_at_once
from dist_attn.models import CausalModel, ModelState
from dist_attn.ops import LocalSequenceOps
from dist_attn.text.base import Tokens
from dist_attn.text.grammars import FollowedGrammar, Grammars
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.specs import check_sampling

__all__ = ["generate", "prefill"]


def generate(
    model: CausalModel,
    prompt_tokens: Tokens,
    spec: SamplingSpec,
    *,
    end_tokens: Collection[int] = (),
    on_token: Callable[[int], None] | None = None,
    steps: StepMode = "auto",
    grammars: Grammars | None = None,
) -> list[int]:
    """The tokens drawn after a prompt: `max_tokens` of them, or those before the first of `end_tokens`.

    `on_token` is called with each token as soon as it is drawn. A seed makes the result repeatable. `steps` says
    whether decode steps run over buffers that stay, see `takes_captured_steps`. `grammars` are the model's, for a
    specification with one.

    Raises: InputError for an unusable specification or an empty prompt; TokenError for ids the model does not know;
    EngineError when the model gives logits that allow no draw; GrammarError.
    """
    check_sampling(spec)
    prompt_L = torch.from_numpy(np.array(prompt_tokens, dtype=np.int64))
    if not len(prompt_L):
        raise InputError("the prompt has no tokens; give at least one, for example the tokeniser's end token")
    spec = spec.after(prompt_tokens)
    generator, ends = generator_for(spec, request=0), spec.ended_by(end_tokens)
    drawn: list[int] = []
    counts = Counter[int]()
    form = FollowedGrammar(grammars, spec.grammar) if spec.grammar else None
    with torch.inference_mode():
        state = prefill(model, prompt_L[:-1])
        device = model.device
        token = int(prompt_L[-1])
        captured = CapturedStep(model, state) if takes_captured_steps(steps, device) else None
        while len(drawn) < spec.max_tokens:
            token_B = torch.tensor([token], device="cpu")
            if captured is not None:
                logits_BV = captured.step(token_B)
            else:
                logits_BV, state = model.step(token_B, state)
            barred = ends if len(drawn) < spec.min_tokens else ()
            (token,) = sample(logits_BV, [spec], [generator], [counts], [barred], [form and form.allowed()])
            if token in ends:
                break
            drawn.append(token)
            counts[token] += 1
            if form is not None:
                form.take(token)
            if on_token is not None:
                on_token(token)
    return drawn


def prefill(model: CausalModel, tokens_L: torch.Tensor, state: ModelState | None = None) -> ModelState:
    """The state after these tokens, fed in blocks to bound the memory; no logits are computed.

    Shapes: tokens [L] int64; none leave the state as it is.
    Raises: TokenError for ids the model does not know.
    """
    state = model.initial_state(1) if state is None else state
    for block_L in tokens_L.split(tokens_at_once(model.device.type)) if len(tokens_L) else ():
        _, state = model.hidden(block_L[None], LocalSequenceOps(), state)
    return state
