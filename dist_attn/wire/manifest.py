"""The facts stored with a state: the model it belongs to and how it was computed; and the report of a restore."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

from dist_attn.errors import StateMismatchError
from dist_attn.wire.choices import WeightPrecision

# \Z, not $: the latter also matches before a newline at the end.
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Kind = Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,40}\Z")]
Version = Annotated[str, Meta(pattern=r"^[0-9A-Za-z.+_-]{1,64}\Z")]
Kernels = Annotated[str, Meta(max_length=1 << 14)]
Size = Annotated[int, Meta(ge=1, le=1 << 40)]
REVISION_DIGITS = 12


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that decides what a state's numbers mean: a state goes on only in a model in which all of it is equal.

    `weights`, `config`, `tokeniser` and `features` are SHA-256 in hex: of the weights' file (of several, of their
    digests), of the bytes of config.json, of what decides the tokens, and of the fixed arrays (such as random matrices)
    as they are loaded.
    None stands for what a model does not have. `mixers` names the kind of every layer. `weight_precision` is how the
    weights were held: rounded ones are another model's. It is left out where they were not rounded, as in states that
    were stored before there was a choice.
    """

    weights: Digest
    config: Digest
    tokeniser: Digest | None
    features: Digest | None
    feature_seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None
    hidden_size: Size
    vocab_size: Size
    mixers: Annotated[list[Kind], Meta(min_length=1, max_length=10_000)]
    weight_precision: WeightPrecision = "float32"

    @property
    def revision(self) -> str:
        """The digits that tell models of one name apart: the first ones of the digest of their weights."""
        return self.weights[:REVISION_DIGITS]


class Computation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The circumstances in which a state was computed: it goes on in others too, but the last bits may differ then.

    `chunk_tokens` is the grid on which blocks are cut, all ranks together, `decode_slots` the rows of a decode batch.
    `denormals_flushed` says whether numbers below the smallest normal one are taken for 0, `dtype` in which precision
    products are; it is left out where that is float32, as in states that were stored before there was a choice.
    `kernels` names flash-linear-attention's that compute affine recurrences on a GPU, with the versions that they were
    tried with; it is left out where there are none. Which tiles were measured for them it does not tell.
    """

    chunk_tokens: Size
    decode_slots: Size
    ranks: Size
    threads: Size
    device: Kind
    denormals_flushed: bool
    library_version: Version
    torch_version: Version
    dtype: Literal["float32", "bfloat16"] = "float32"
    kernels: Kernels = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that a state belongs to, and how it was computed."""

    model: ModelIdentity
    computed: Computation


class RestoreReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a restore: the position reached, the tokens read again, and whether the bits are equal.

    `bit_exact` promises that what follows has the bits of a run that was never interrupted; `reason` says why not.
    """

    restored_position: int
    recomputed_tokens: int
    bit_exact: bool
    reason: str


def require_same_model(stored: ModelIdentity, present: ModelIdentity) -> None:
    """Raises: StateMismatchError naming the first thing in which the models differ, and both values."""
    for name in structs.asdict(stored):
        ours, theirs = getattr(present, name), getattr(stored, name)
        if ours != theirs:
            remedy = "restore it with the model it was made with, or read the text again"
            if name == "weights":
                remedy = (
                    f"it was made by revision {stored.revision}, and {present.revision} is served here: serve the "
                    "folder of that revision (--model), or read the text again in a new session"
                )
            if name == "weight_precision":
                remedy = f"hold the weights as {theirs} (engine.weights), or read the text again"
            raise StateMismatchError(
                f"the state belongs to another model: its {name} is {_short(theirs)}, that of the model here is "
                f"{_short(ours)}; {remedy}"
            )


def why_other_bits(stored: Computation, present: Computation) -> str:
    """Say why further results may have other bits than where the state was made; empty when nothing differs."""
    differences = [
        f"{name} was {_named(getattr(stored, name))} and is {_named(getattr(present, name))}"
        for name in structs.asdict(stored)
        if getattr(stored, name) != getattr(present, name)
    ]
    return "; ".join(differences)


def report_restore(
    stored: Computation, present: Computation, position: int, *, wanted: int | None = None, storage: str = "exact"
) -> RestoreReport:
    """Report on going on from a state at `position`, after the tokens up to `wanted` have been read again."""
    reasons = [] if storage == "exact" else [f"the state was stored as {storage}, not exactly"]
    if other := why_other_bits(stored, present):
        reasons.append(other)
    again = 0 if wanted is None else wanted - position
    if again and position % stored.chunk_tokens:
        reasons.append(
            f"position {position} is not on the grid of {stored.chunk_tokens} tokens, so what follows is cut into "
            "other blocks"
        )
    return RestoreReport(position, again, not reasons, "; ".join(reasons))


def _named(value: object) -> object:
    return "none" if value == "" else value


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
