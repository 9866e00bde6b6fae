"""Models of the papers draw the random matrices of a step from their pools."""

import pytest
import torch
from pydantic import TypeAdapter

from dist_attn.models import ModelConfig, build_model
from tests.mixers.test_random_matrices import ENCODER, HEADS, SEEN, assert_draws_from_its_pools

IMAGE = {"height": 2, "width": 4, "channels": 1, "patch": 1}
POOLED: dict[str, dict[str, object]] = {
    "vision_classifier": {"num_classes": 2, "image": IMAGE, "encoder": {**ENCODER, "mixer": SEEN}},
    "masked_autoencoder": {"image": IMAGE, "encoder": {**ENCODER, "mixer": SEEN}},
    "encoder_decoder": {
        "vocab_size": 7,
        "encoder": {**ENCODER, "mixer": {**SEEN, "attention": "softmax", "pool": 0, "orthogonal": False}},
        "decoder": {
            "num_layers": 2,
            "mlp_size": 12,
            "mixer": {"kind": "rfa", **HEADS, "pool": 0},
            "cross": {"attention": "rfa", **HEADS},
        },
    },
}


@pytest.mark.parametrize("kind", POOLED)
def test_every_kind_of_model_draws_from_its_pools(kind: str) -> None:
    """A redraw changes what the model gives in training, by the step alone, and nothing at test."""
    model = build_model(TypeAdapter(ModelConfig).validate_python({"kind": kind, **POOLED[kind]}))
    tokens = torch.arange(8)[None] % 7

    def output() -> torch.Tensor:
        with torch.no_grad():
            match kind:
                case "encoder_decoder":
                    return model(tokens, tokens)
                case "masked_autoencoder":
                    return model(model.prepare(tokens.float().view(1, 1, 2, 4)), tokens == 3)
            return model.classify(tokens.float().view(1, 1, 2, 4))

    assert_draws_from_its_pools(model, output)
