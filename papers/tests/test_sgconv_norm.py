"""SGConv's kernel is divided by the norm that it has at first, which stays what it was."""

from pathlib import Path

import torch

from dist_attn.checkpoints import load_any_model, save_model
from dist_attn.models import TextClassifier, TextClassifierConfig
from dist_attn_papers.mixers.structured_convolution import StructuredConvolution

SIZE = 6
MIXER = {"kind": "sgconv", "hidden_size": SIZE, "piece": 4, "length": 30, "bidirectional": True}


def _model(seed: int) -> TextClassifier:
    torch.manual_seed(seed)
    encoder = {"hidden_size": SIZE, "num_layers": 1, "mlp_size": 8, "mixer": MIXER}
    return TextClassifier(TextClassifierConfig.model_validate({"vocab_size": 9, "num_classes": 2, "encoder": encoder}))


def _mixer(model: TextClassifier) -> StructuredConvolution:
    (mixer,) = (module for module in model.modules() if isinstance(module, StructuredConvolution))
    return mixer


def test_the_first_norm_stays(tmp_path: Path) -> None:
    """Kernels of the first call have norm 1; their divisor is the same after training, and in a model folder."""
    model, tokens_BL = _model(0), torch.arange(9)[None]
    mixer = _mixer(model)
    model.classify(tokens_BL)[0, 0].backward()
    first_SD = mixer.norm_SD.clone()
    for side in (0, 1):
        torch.testing.assert_close(mixer.kernel(side).norm(dim=0), torch.ones(SIZE))
    torch.optim.Adam(model.parameters(), lr=0.1).step()  # every number moves by 0.1
    model.classify(tokens_BL)
    assert torch.equal(mixer.norm_SD, first_SD)
    assert float((mixer.kernel().detach().norm(dim=0) - 1).abs().max()) > 1e-3
    save_model(model, tmp_path / "trained")
    resumed = _model(1)
    assert not torch.equal(_mixer(resumed).norm_SD, first_SD)
    resumed.load_state_dict(model.state_dict())
    for back in (load_any_model(tmp_path / "trained"), resumed):
        assert torch.equal(_mixer(back).norm_SD, first_SD)
        assert torch.equal(_mixer(back).kernel(), mixer.kernel())
