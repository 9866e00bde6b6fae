"""Every token mixer in one table, by kind and form: its paradigm, what it can do, and what one layer of it costs."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from dist_attn.commands.options import parse_count
from dist_attn.commands.tables import Table, byte_size, print_tables
from dist_attn.costs import LayerCosts
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import MixerConfig, Paradigm, build_mixer
from dist_attn.model_config.mixer import MIXERS, registered_mixers
from dist_attn.model_config.mixers.attention import ATTENTIONS


@dataclass(frozen=True)
class MixerFacts:
    """One kind of mixer, in the `form` that is named or as its defaults have it where none is.

    Units: floating-point operations; bytes. `bytes_sent` is what the rank that sends most sends, forward; `state_bytes`
    what a session keeps after all tokens.
    """

    kind: str
    form: str
    paradigm: Paradigm
    causal: bool
    streams: bool
    parameters: int
    flops_per_token: float
    state_bytes: int
    travels: str
    bytes_sent: int


def mixer_facts(tokens: int, *, hidden_size: int, num_heads: int, ranks: int) -> list[MixerFacts]:
    """The facts of all kinds, for a layer of this width over a sequence of `tokens` in equal parts on `ranks` ranks.

    Raises: InputError for sizes that do not make a mixer.
    """
    lengths = SequenceLayout.even(tokens, ranks).lengths
    # The paradigm of a kind's class; sizes do not enter.
    paradigms = {(small.kind, form): build_mixer(small).paradigm for form, small in _configs(4, 1, 4)}
    facts = []
    for form, config in _configs(hidden_size, num_heads, tokens):
        costs = LayerCosts(config)
        facts.append(
            MixerFacts(
                kind=config.kind,
                form=form,
                paradigm=paradigms[config.kind, form],
                causal=config.causal,
                streams=config.streams,
                parameters=costs.parameters,
                flops_per_token=costs.prefill_flops(tokens, ranks).total,
                state_bytes=costs.state_bytes(tokens),
                travels=costs.travels if ranks > 1 else "",
                bytes_sent=max(costs.bytes_sent(lengths, rank) for rank in range(ranks)),
            )
        )
    return facts


def print_mixers(tokens: str, *, hidden_size: int, num_heads: int, ranks: int, as_json: bool) -> None:
    """Print the table, or a JSON object.

    Raises: InputError for a count that cannot be read or sizes that do not make a mixer.
    """
    count = parse_count(tokens)
    facts = mixer_facts(count, hidden_size=hidden_size, num_heads=num_heads, ranks=ranks)
    if as_json:
        about = {"tokens": count, "ranks": ranks, "hidden_size": hidden_size, "num_heads": num_heads}
        print(json.dumps({"object": "mixers", **about, "mixers": [_as_object(one) for one in facts]}))
        return
    header = ("kind", "paradigm", "causal", "streams", "parameters", "flop/token", "state", "a rank sends", "of")
    rows = [
        (
            f"{one.kind}, {one.form}" if one.form else one.kind,
            f"{one.paradigm.value} {one.paradigm}",
            "yes" if one.causal else "no",
            "yes" if one.streams else "no",
            f"{one.parameters:,}",
            f"{one.flops_per_token:,.0f}",
            byte_size(one.state_bytes) if one.streams else "",
            byte_size(one.bytes_sent) if ranks > 1 else "",
            one.travels,
        )
        for one in facts
    ]
    on = "1 rank" if ranks == 1 else f"{ranks:,} ranks"
    print_tables(
        f"One layer of width {hidden_size:,} with {num_heads} heads over {count:,} tokens on {on}",
        [Table("Token mixers", rows, header)],
        [
            "Options as they are by default, but for what a row names; bidirectional is over all keys, with the "
            "attention named. Paradigms are those of the unified view of long-sequence models (Sec. 2), which counts "
            "state spaces as dependent on the input.",
            "Causal: no token sees a later one. Streams: a state goes on, so a language model can have it. What a rank "
            "sends is for the whole sequence, forward.",
        ],
    )


def _configs(hidden_size: int, num_heads: int, tokens: int) -> list[tuple[str, MixerConfig]]:
    """A configuration of every kind and form, with the sizes that have no default.

    Kinds that need more than sizes have no row.
    """
    MIXERS.load_offered()
    ATTENTIONS.load_offered()
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "length": tokens, "token_mlp_size": hidden_size}
    configs: list[tuple[str, MixerConfig]] = []
    for kind, config in sorted(registered_mixers().items()):
        fields = config.model_fields
        known = {"kind": kind, **{name: size for name, size in sizes.items() if name in fields}}
        for form, options in config.forms.items():
            values = {**known, **options}
            if any(field.is_required() and name not in values for name, field in fields.items()):
                continue
            try:
                configs.append((form, config.model_validate(values)))
            except ValidationError as error:
                said = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise InputError(f"{kind} cannot have these sizes: {said}") from None
    return configs


def _as_object(facts: MixerFacts) -> dict[str, Any]:
    paradigm = facts.paradigm
    named = {"number": paradigm.value, "learned": paradigm.learned, "dependent": paradigm.dependent}
    return {**asdict(facts), "paradigm": named}
