"""A completion before the engine: options checked, prompts tokenised, and the choices that continue them."""

import asyncio
import hashlib
import time
import uuid
from dataclasses import dataclass, field, replace

import msgspec

from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import SamplingSpec
from dist_attn_service.base.errors import BadRequest
from dist_attn_service.base.parsing import RequestTerms, parse_drawing, parse_texts
from dist_attn_service.completions.answer_form import grammar_of
from dist_attn_service.completions.tool_calls import CallReading
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.schemas.completions import CompletionRequest

MOST_SCORES = 1 << 17  # log-probabilities of prompts in one answer, which is in memory as a whole


@dataclass(frozen=True)
class Prompt:
    """A prompt that choices continue; `echo` is its text when that is to stand before the continuation."""

    tokens: TokenArray
    echo: str = ""


@dataclass(frozen=True)
class PlannedChoice:
    """One of the texts that were asked for."""

    index: int
    prompt: Prompt
    sampling: SamplingSpec
    place: int = 0  # of its prompt

    def held_to(self, grammar: str) -> "PlannedChoice":
        """The choice with a grammar that its text follows."""
        return replace(self, sampling=msgspec.structs.replace(self.sampling, grammar=grammar))


@dataclass(frozen=True)
class PreparedCompletion:
    """A checked request: what the engine needs and how its tokens become text.

    Of the `choices` of each prompt `answered` are sent: all of them, or the likeliest (`best_of`).
    """

    prompts: tuple[Prompt, ...]
    choices: tuple[PlannedChoice, ...]
    stops: tuple[str, ...]
    logprobs: int | None = None
    answered: int = 1
    terms: RequestTerms = field(default_factory=RequestTerms)
    caller: str | None = None  # whose stored prefixes may be used; None: no caller's
    lead: str = ""  # is left out where a choice's text begins with it
    calls: CallReading | None = None  # that are taken out of the text
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices continue it."""
        return sum(len(prompt.tokens) for prompt in self.prompts)


async def prepare(
    context: ServiceContext, request: CompletionRequest, terms: RequestTerms, caller: str | None = None
) -> PreparedCompletion:
    """Check the options and tokenise the prompts. `caller` is whose stored prefixes may be used; None: no caller's.

    Raises: BadRequest naming the parameter.
    """
    limits = context.settings
    vocab_size = context.tokeniser.vocab_size
    sampling, stops = parse_drawing(request, limits, vocab_size, context.model.drawing)
    if not sampling.max_tokens and not request.echo:
        raise BadRequest("max_tokens=0 draws nothing; send echo=true with it, or at least 1", param="max_tokens")
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream=true", param="stream_options")
    if request.return_progress and not request.stream:
        raise BadRequest("return_progress needs stream=true", param="return_progress")
    sampling = msgspec.structs.replace(sampling, grammar=await grammar_of(context, request))
    texts = parse_texts(request.prompt, "prompt", vocab_size, limits.max_choices)
    n = request.n or 1
    drawn = _drawn_per_prompt(request, n, len(texts), limits.max_choices)
    if request.logprobs is None and drawn > n:  # the best of several choices are the likeliest ones
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    if request.echo:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=request.logprobs)
    framed = request.add_special_tokens is not False
    prompts = [await _prompt(context, text, echo=bool(request.echo), framed=framed) for text in texts]
    if sampling.prompt_logprobs is not None:
        _check_scores(drawn * sum(len(prompt.tokens) for prompt in prompts), sampling.prompt_logprobs)
    after = [sampling] * len(prompts)
    if sampling.repetition_penalty != 1:  # which sorts all tokens
        after = [await asyncio.to_thread(sampling.after, prompt.tokens) for prompt in prompts]
    choices = [
        PlannedChoice(place * drawn + number, prompt, _of_choice(after[place], number), place)
        for place, prompt in enumerate(prompts)
        for number in range(drawn)
    ]
    return PreparedCompletion(tuple(prompts), tuple(choices), stops, request.logprobs, n, terms, caller)


def _drawn_per_prompt(request: CompletionRequest, n: int, prompts: int, limit: int) -> int:
    """The number of choices drawn for each prompt: `n`, or `best_of`, of which the `n` best are answered."""
    drawn, name = (n, "n") if request.best_of is None else (request.best_of, "best_of")
    if drawn < n:
        raise BadRequest(f"best_of={drawn} is less than n={n}; send at least that, or leave it out", param=name)
    if drawn > n and request.stream:
        raise BadRequest(
            f"best_of={drawn} with stream: which choices are best is known at the end only; leave stream out, or "
            "best_of",
            param=name,
        )
    if drawn * prompts > limit:
        raise BadRequest(
            f"{name}={drawn} of {prompts} prompts makes {drawn * prompts} choices; one request may ask for {limit}",
            param=name,
        )
    return drawn


async def _prompt(context: ServiceContext, text: bytes | TokenArray, *, echo: bool, framed: bool) -> Prompt:
    if isinstance(text, bytes):
        tokens = await context.tokeniser.whole(text, framed=framed)
        return Prompt(tokens, text.decode() if echo else "")
    return Prompt(text, await context.tokeniser.text(text) if echo else "")


def _check_scores(tokens: int, likeliest: int) -> None:
    """Refuse more log-probabilities of prompts than an answer may hold. Raises: BadRequest."""
    if tokens * (1 + likeliest) > MOST_SCORES:
        raise BadRequest(
            f"echo with logprobs={likeliest} makes {tokens * (1 + likeliest)} log-probabilities of {tokens} prompt "
            f"tokens, which count for each choice; one answer holds {MOST_SCORES}: send shorter texts or fewer of them",
            param="logprobs",
        )


def _of_choice(sampling: SamplingSpec, number: int) -> SamplingSpec:
    """The sampling of choice `number` of a prompt: the first draws what it would draw alone, the others differ."""
    if sampling.seed is None or number == 0:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed} {number}".encode()).digest()
    return msgspec.structs.replace(sampling, seed=int.from_bytes(digest[:8], "little", signed=True))
