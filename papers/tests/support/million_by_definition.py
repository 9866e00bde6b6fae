"""The million-scale model by definition: one token after the other, from its parameters alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.ops.token_selection import upsample_naive

__all__ = ["ByDefinition", "million_by_definition"]

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class ByDefinition:
    """What one sequence becomes; `rate_loss` and `balance` as they are added to its loss, less the latter's factor."""

    logits_C: Tensor
    hidden_LD: Tensor
    kept: list[int]
    dropped: int
    rate_loss: Tensor
    balance: Tensor


def million_by_definition(
    config: MillionConfig, p: Parameters, tokens: list[int], *, training: bool, step: int = 0, draw: int = 0
) -> ByDefinition:
    """Embedding, Selector, layers of experts, Fourier mixing, up-sampling and head of one sequence.

    Reference: A Unified View of Long-Sequence Models, Sec. 10, Fig. 4, Eq. 26 and 27; papers/docs/million.md for
    what they leave open.
    """
    x = _in_context(config, p, [p["embedding.weight"][token] for token in tokens])
    logits = _logits(config, p, x)
    scores, weights, opens = zip(*_gates(config, logits, training, step, draw), strict=True)
    kept = _kept(config, [score.item() for score in scores], training)
    w = [weights[n] for n in kept]
    z = [x[n] + _position(config, p, n) for n in kept]
    balances, dropped = [], 0
    for layer in range(config.num_layers):
        z, balance, lost = _experts(config, _part(p, f"layers.{layer}"), z, w)
        balances.append(balance)
        dropped += lost
    if config.global_mixing:
        z = _fourier_block(_part(p, "mixing"), z, w)
    z = [_norm(_part(p, "norm"), one) for one in z]
    neighbours = config.upsampling.neighbours if config.upsampling.kind == "knn" else None
    weighed = torch.stack([a * one for a, one in zip(w, z, strict=True)])
    hidden_LD = upsample_naive(weighed, torch.tensor(kept), torch.arange(len(tokens)), neighbours=neighbours)
    pooled = sum(weighed) / sum(w) if config.pooling == "kept" else sum(hidden_LD) / len(tokens)
    return ByDefinition(
        logits_C=_linear(_part(p, "head"), pooled),
        hidden_LD=hidden_LD,
        kept=kept,
        dropped=dropped,
        rate_loss=_rate_loss(config, sum(opens) / len(tokens), step),
        balance=sum(balances) / len(balances),
    )


def _in_context(config: MillionConfig, p: Parameters, x: list[Tensor]) -> list[Tensor]:
    if config.context == 1:
        return x
    taps = p["context_KD"]
    return [
        sum(
            taps[k] * x[t - k + config.context // 2]
            for k in range(config.context)
            if 0 <= t - k + config.context // 2 < len(x)
        )
        for t in range(len(x))
    ]


def _logits(config: MillionConfig, p: Parameters, x: list[Tensor]) -> list[Tensor]:
    p = _part(p, "selector")
    found = []
    for one in x:
        h = _norm(_part(p, "norm"), one.detach() if config.objective == "adversarial" else one)
        if config.selector.hidden_size is not None:
            h = _linear(_part(p, "map_in"), h).clamp(min=0.0)
        found.append(_linear(_part(p, "score"), h)[0])
    return found


def _gates(
    config: MillionConfig, logits: list[Tensor], training: bool, step: int, draw: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What decides about each token, what it weighs when it is kept, and how open its gate is."""
    s = config.selector
    limit, temperature = math.log(s.threshold / (1 - s.threshold)), s.temperature
    if s.final_temperature is not None:
        temperature *= (s.final_temperature / s.temperature) ** min(1.0, step / s.anneal_steps)
    gates = []
    for position, logit in enumerate(logits):
        score = torch.sigmoid(logit)
        soft = torch.sigmoid((score - s.threshold) / temperature)
        noisy = torch.sigmoid((logit - limit + _logistic(position, (s.seed, draw))) / temperature)
        if s.gate == "top_k":
            gates.append((score, score, score))
        elif not training:
            gates.append((score, torch.ones_like(score), score))
        elif s.gate == "straight_through":
            through = soft - soft.detach()  # 0 with the gradient of the soft gate
            gates.append((score, 1 + through, float(score.item() >= s.threshold) + through))
        elif s.gate == "soft":
            gates.append((score, soft, soft))
        elif s.gate == "gumbel":
            gates.append((noisy, 1 + noisy - noisy.detach(), torch.sigmoid(logit - limit)))
        else:
            stretched = (1.2 * noisy - 0.1).clamp(0.0, 1.0)
            gates.append((stretched, stretched, torch.sigmoid(logit - limit - temperature * math.log(0.1 / 1.1))))
    return gates


def _kept(config: MillionConfig, scores: list[float], training: bool) -> list[int]:
    s = config.selector
    best_first = sorted(range(len(scores)), key=lambda n: (-scores[n], n))
    most = len(scores) if s.most_tokens is None else s.most_tokens
    if s.gate == "top_k":
        passing = best_first[: max(1, math.ceil(Fraction(str(s.rate)) * len(scores)))]
    elif training and s.gate == "soft":
        passing = best_first
    elif training and s.gate == "gumbel":
        passing = [n for n in best_first if scores[n] >= 0.5]
    elif training and s.gate == "hard_concrete":
        passing = [n for n in best_first if scores[n] > 0.0]
    else:
        passing = [n for n in best_first if scores[n] >= s.threshold]
    return sorted((passing or best_first[:1])[:most])


def _rate_loss(config: MillionConfig, share: Tensor, step: int) -> Tensor:
    s = config.selector
    if s.gate == "top_k":
        return 0.0 * share
    over = share - s.rate if s.rate_penalty == "around" else (share - s.rate).clamp(min=0.0)
    return (min(1.0, step / s.rate_warmup) if s.rate_warmup else 1.0) * s.rate_weight * over**2


def _position(config: MillionConfig, p: Parameters, position: int) -> Tensor | float:
    if config.positions == "none":
        return 0.0
    angles = [position / 10_000.0 ** (2 * (d // 2) / config.hidden_size) for d in range(config.hidden_size)]
    waves = torch.tensor([math.cos(a) if d % 2 else math.sin(a) for d, a in enumerate(angles)], dtype=torch.float64)
    return p["position_scale_D"] * waves.float().double()  # the model keeps them in single precision


def _experts(
    config: MillionConfig, p: Parameters, x: list[Tensor], w: list[Tensor]
) -> tuple[list[Tensor], Tensor, int]:
    """The tokens behind a layer of experts, E sum_e f_e P_e, and how many assignments found no room."""
    r = config.router
    probabilities = [torch.softmax(p["router.weight"] @ _norm(_part(p, "router_norm"), one), dim=0) for one in x]
    chosen = [sorted(range(r.num_experts), key=lambda e: -one[e].item())[: r.choices] for one in probabilities]
    room = math.ceil(Fraction(str(r.capacity_factor)) * r.choices * len(x) / r.num_experts)
    room = max(1, room if r.most_tokens is None else min(room, r.most_tokens))
    rows: list[list[int]] = [[] for _ in range(r.num_experts)]
    for choice in range(r.choices):
        for n in range(len(x)):
            if len(rows[chosen[n][choice]]) < room:
                rows[chosen[n][choice]].append(n)
    z = list(x)
    for e, own in enumerate(rows):
        made = _expert(_part(p, f"experts.{e}"), [x[n] for n in own], [w[n] for n in own], config.num_heads)
        for n, added in zip(own, made, strict=True):
            whole = probabilities[n][chosen[n]].sum() if r.choices == 2 else 1.0
            z[n] = z[n] + probabilities[n][e] / whole * added
    shares = [sum(one[0] == e for one in chosen) / len(x) for e in range(r.num_experts)]
    balance = r.num_experts * sum(f * sum(q[e] for q in probabilities) / len(x) for e, f in enumerate(shares))
    return z, balance, r.choices * len(x) - sum(len(own) for own in rows)


def _expert(p: Parameters, x: list[Tensor], w: list[Tensor], heads: int) -> list[Tensor]:
    """What an expert adds to each of its tokens: attention by scores and weights, and an MLP behind it."""
    q, k, v = ([_third(p, number, x_D) for x_D in x] for number in range(3))
    made = []
    for i, x_D in enumerate(x):
        mixed = []
        for h in range(heads):
            size = len(x_D) // heads
            own = slice(h * size, (h + 1) * size)
            factors = [torch.exp(q[i][own] @ k[j][own] / math.sqrt(size)) * _weight(w[j]) for j in range(len(x))]
            mixed.append(sum(f * v[j][own] for j, f in enumerate(factors)) / sum(factors))
        mixed_D = p["out.weight"] @ torch.cat(mixed)
        made.append(mixed_D + _mlp(p, x_D + mixed_D))
    return made


def _third(p: Parameters, number: int, x_D: Tensor) -> Tensor:
    size = len(x_D)
    return p["qkv.weight"][number * size : (number + 1) * size] @ _norm(_part(p, "norm"), x_D)


def _weight(weight: Tensor) -> Tensor | float:
    return weight if weight.item() >= 1e-6 else 1e-6


def _fourier_block(p: Parameters, x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    weighed_ND = torch.stack([a * _norm(_part(p, "norm"), one) for a, one in zip(w, x, strict=True)])
    tokens, size = weighed_ND.shape
    m_N1, c_D = torch.arange(tokens, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    found = []
    for n, x_D in enumerate(x):
        waves = [torch.cos(2 * math.pi * (n * m_N1 / tokens + d * c_D / size)) for d in range(size)]
        z_D = x_D + torch.stack([(wave * weighed_ND).sum() for wave in waves]) / math.sqrt(tokens * size)
        found.append(z_D + _mlp(p, z_D))
    return found


def _mlp(p: Parameters, x_D: Tensor) -> Tensor:
    h = _linear(_part(p, "mlp_in"), _norm(_part(p, "mlp_norm"), x_D))
    h = h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
    return _linear(_part(p, "mlp_out"), h)


def _norm(p: Parameters, x_D: Tensor) -> Tensor:
    mean = x_D.mean()
    return (x_D - mean) / torch.sqrt(((x_D - mean) ** 2).mean() + 1e-5) * p["weight"] + p["bias"]


def _linear(p: Parameters, x_D: Tensor) -> Tensor:
    return p["weight"] @ x_D + p["bias"]


def _part(p: Parameters, name: str) -> Parameters:
    """The parameters below a name."""
    return {key.removeprefix(f"{name}."): value for key, value in p.items() if key.startswith(f"{name}.")}


def _logistic(position: int, seeds: tuple[int, int]) -> float:
    """log u - log(1 - u) of a SplitMix64 number of the position."""
    state = position
    for seed in seeds:
        state = _split_mix(state ^ _split_mix(seed % 2**64))
    u = ((_split_mix(state) >> 11) + 0.5) / 2**53
    return math.log(u) - math.log1p(-u)


def _split_mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)
