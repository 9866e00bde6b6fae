"""Small models of every kind of mixer of the papers that streams; `tests.support.model_cases` makes them."""

from dist_attn.model_config.mixer import MIXERS
from tests.support.model_cases import MODEL_CASES

__all__ = ["PAPERS_CASES"]

MIXERS.load_offered()
PAPERS_CASES = {
    "positive features": {"mixer": {"kind": "performer", "num_heads": 4, "num_random": 16}},
    "positive features, gated, a pool, biases": {
        "mixer": {
            "kind": "performer",
            "num_heads": 2,
            "num_random": 40,
            "gated": True,
            "pool": 3,
            "orthogonal": False,
            "short_convolution": 0,
            "rotary": {"size": 8},
            "projection_bias": True,
        }
    },
    "efficient": {"mixer": {"kind": "efficient", "num_heads": 4}},
    "efficient, gated": {
        "mixer": {"kind": "efficient", "num_heads": 2, "gated": True, "value_rank": 24, "short_convolution": 0}
    },
    "relative positions": {"mixer": {"kind": "scaleformer", "num_heads": 4, "reach": 5}},
    "relative positions, none behind": {"mixer": {"kind": "scaleformer", "num_heads": 2, "reach": 0}},
    "relative positions, values of full rank": {
        "mixer": {"kind": "scaleformer", "num_heads": 2, "reach": 5, "value_rank": 64}
    },
    "hybrid with relative positions": {
        "mixer": {
            "kind": "hybrid",
            "pattern": [{"kind": "scaleformer", "num_heads": 4, "reach": 5}, {"kind": "softmax", "num_heads": 2}],
        },
    },
    "static kernel": {"mixer": {"kind": "static_kernel", "num_heads": 1, "feature": "elu"}},
    "static kernel, random features": {
        "mixer": {"kind": "static_kernel", "num_heads": 4, "feature": "gaussian", "num_random": 16, "divisor": "length"}
    },
    "state space": {"mixer": {"kind": "s4d", "state_size": 12}},
    "low-rank state space": {"mixer": {"kind": "s4", "state_size": 8}},
    "full state space": {"mixer": {"kind": "lssl", "state_size": 6, "outputs": 2}},
    "full state space, learned": {"mixer": {"kind": "lssl", "state_size": 8, "transition": "learned", "alpha": 1.0}},
    "memory of the whole past": {"mixer": {"kind": "hippo", "state_size": 12}},
    "hybrid with a state space": {
        "num_layers": 3,
        "mixer": {
            "kind": "hybrid",
            "pattern": [{"kind": "rfa_gate", "num_heads": 4, "num_random": 16}, {"kind": "s4d", "state_size": 12}],
        },
    },
}
MODEL_CASES.update(PAPERS_CASES)
