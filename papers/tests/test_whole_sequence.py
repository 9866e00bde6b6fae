"""Mixers that take a sequence whole: over ranks as on one, golden vectors, and no step."""

import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import MixerConfig, build_mixer
from dist_attn.model_config.language_model import BlockConfig, MlpConfig, NormConfig
from dist_attn.models.blocks import Block
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.mixers.structured_convolution import stretched_kernel
from dist_attn_papers.ops import long_convolve
from dist_attn_papers.ops.state_space import diagonal_kernel, legs
from tests.mixers import test_whole_sequence as core
from tests.support.closeness import assert_close
from tests.support.golden import golden

SIZE, LENGTH = 6, 40
MIXERS = {
    "static kernel": {"kind": "static_kernel", "bidirectional": True, "num_heads": 2},
    "static kernel, sums": {
        "kind": "static_kernel", "bidirectional": True, "feature": "arc_cosine", "num_random": 7, "divisor": "none",
    },
    "fnet": {"kind": "fnet"},
    "fnet, unitary": {"kind": "fnet", "norm": "ortho"},
    "mlp_mixer": {"kind": "mlp_mixer", "length": LENGTH, "token_mlp_size": 5},
    "sgconv": {"kind": "sgconv", "piece": 4, "length": 30},
    "sgconv, both ways": {
        "kind": "sgconv", "piece": 3, "length": 50, "decay": [1.0, 3.0], "bidirectional": True,
        "interpolation": "nearest",
    },
    "s4d, convolution": {"kind": "s4d", "state_size": 8, "form": "convolution"},
    "s4, convolution": {"kind": "s4", "state_size": 6, "form": "convolution"},
    "s4, both ways": {"kind": "s4", "state_size": 4, "form": "convolution", "bidirectional": True},
    "s4d, both ways": {
        "kind": "s4d", "state_size": 6, "form": "convolution", "bidirectional": True, "spectrum": "legs",
        "rule": "bilinear",
    },
}  # fmt: skip
core.MIXERS.update(MIXERS)


def _mixer(name: str):
    torch.manual_seed(0)
    return build_mixer(MixerConfig.model_validate({"hidden_size": SIZE, **MIXERS[name]})).double()


@pytest.mark.parametrize("lengths", [(17, 23), (0, 11, 2, 27), (40, 0)])
@pytest.mark.parametrize("name", MIXERS)
def test_ranks_change_nothing(name, lengths):
    """Over several ranks outputs and the gradients of inputs and parameters are those of one rank."""
    core.test_ranks_change_nothing(name, lengths)


@pytest.mark.parametrize("name", MIXERS)
def test_a_step_of_training_under_autocast(name):
    """Under bf16 autocast outputs and gradients are finite, and those of float32 as far as bf16 can tell."""
    core.test_a_step_of_training_under_autocast(name)


@pytest.mark.parametrize("name", MIXERS)
def test_there_is_no_step(name):
    """Asked for a step, or given a state, each says so in words; nor can a language model have it."""
    core.test_there_is_no_step(name)


def test_token_mixing_names_its_length_on_every_rank():
    """A sequence of another length is refused on every rank, with both numbers."""
    layout = SequenceLayout.from_lengths([20, 0, 19])

    def body(comm: Communicator) -> None:
        ops = ShardedSequenceOps(comm, layout)
        with pytest.raises(InputError, match="39 tokens; token mixing has weights for exactly 40"):
            _mixer("mlp_mixer")(torch.zeros(1, layout.lengths[comm.rank], SIZE, dtype=torch.float64), ops)

    assert run_simulated(body, 3) == [None] * 3


def test_golden_token_mixing():
    """MLP-Mixer's token MLP between its norms gives the golden block's tokens."""
    g = golden("mixer")
    mixer = build_mixer(
        MixerConfig.model_validate({"kind": "mlp_mixer", "hidden_size": 5, "length": 6, "token_mlp_size": 4})
    ).double()
    with torch.no_grad():
        for parameter, name in ((mixer.token_in_LS, "W1"), (mixer.bias_in_S, "c1"), (mixer.token_out_SL, "W2"),
                                (mixer.bias_out_L, "c2")):  # fmt: skip
            parameter.copy_(g[name])
    normed = F.layer_norm(g["X"], (5,), g["g1"], g["b1"], eps=1e-6)
    y, _ = mixer(normed[None], LocalSequenceOps())
    assert_close(g["X"] + y[0], g["tokens"], kind="golden")


def test_golden_mixer_block():
    """A block of token mixing, and its MLP over the channels behind, is the golden one of MLP-Mixer."""
    g = golden("mixer")
    values = {"kind": "mlp_mixer", "hidden_size": 5, "length": 6, "token_mlp_size": 4}
    config = BlockConfig(norm=NormConfig(eps=1e-6), mlp=MlpConfig(activation="gelu_tanh"))
    block = Block(MixerConfig.model_validate(values), 7, config).double()
    golden_names = {
        "mixer_norm.weight": "g1", "mixer_norm.bias": "b1", "mlp_norm.weight": "g2", "mlp_norm.bias": "b2",
        "mixer.token_in_LS": "W1", "mixer.bias_in_S": "c1", "mixer.token_out_SL": "W2", "mixer.bias_out_L": "c2",
        "mlp_in.weight": "U1", "mlp_in.bias": "e1", "mlp_out.weight": "U2", "mlp_out.bias": "e2",
    }  # fmt: skip
    # Layers of torch hold the transposed matrix.
    values = {ours: g[name].T if name in ("U1", "U2") else g[name] for ours, name in golden_names.items()}
    block.load_state_dict(values)
    assert_close(block(g["X"][None], LocalSequenceOps())[0][0], g["out"], kind="golden")


@pytest.mark.parametrize("decay", ["d2", "dvar"])
@pytest.mark.parametrize("interpolation", ["linear", "nearest"])
def test_golden_sgconv(interpolation, decay):
    """Stretched kernels, their norms, and convolutions shorter and longer than the kernel are the golden ones."""
    g, name = golden("sgconv"), f"{interpolation}_{decay}"
    kernel_LD = stretched_kernel(g["w"], g[f"{decay}_decay"], interpolation)
    assert_close(kernel_LD.norm(dim=0), g[f"{name}_Z"], kind="golden")
    kernel_LD = kernel_LD / kernel_LD.norm(dim=0)
    assert_close(kernel_LD.T, g[f"{name}_K"], kind="golden")
    for length in (20, 32, 40):
        u_LD = g[f"u{length}"].T
        y = long_convolve(u_LD[None], kernel_LD)[0] + g["D"] * u_LD
        assert_close(y.T, g[f"{name}_y{length}"], kind="golden")


def test_golden_bidirectional_state_space():
    """Two state spaces, one for the past and one for what follows, give the golden outputs."""
    g = golden("s4d")
    u_LD = g["u"].T
    y = long_convolve(u_LD[None], g["lin_zoh_K"].T, backward_kernel_LD=g["inv_zoh_K"].T)[0]
    assert_close((y + g["D"] * u_LD).T, g["bidir_y"], kind="golden")


@pytest.mark.parametrize("form", ["scan", "convolution"])
def test_legs_of_s4d_is_the_normal_part_of_hippo(form):
    """A diagonal space at `legs` answers as x' = (A + P P^T) x + B u does that is read by B, held over each step."""
    mixer = build_mixer(
        MixerConfig.model_validate(
            {"kind": "s4d", "hidden_size": 1, "state_size": 8, "spectrum": "legs", "form": form, "dt_min": 0.05}
        )
    ).double()
    a, b, _ = mixer.space.discrete()
    a_NN, b_N, p_N = legs(8)
    normal_NN = a_NN + p_N[:, None] * p_N
    step_NN = torch.linalg.matrix_exp(mixer.space.log_dt_D.detach().exp() * normal_NN)
    x_N, want = torch.linalg.solve(normal_NN, (step_NN - torch.eye(8)) @ b_N), []
    for _ in range(60):
        want.append(b_N @ x_N)
        x_N = step_NN @ x_N
    # In the eigenvectors C = B^T is the conjugate of what B is, which is real here.
    taps_LD = diagonal_kernel(a, b, mixer.space.b_N.to(a.dtype)[None], 60)
    assert_close(taps_LD[:, 0].float(), torch.stack(want).float(), kind="golden")
    assert {"space.b_N"} == mixer.state_dict().keys() - dict(mixer.named_parameters()).keys()


@pytest.mark.parametrize("kind", ["s4", "s4d"])
def test_the_scan_is_the_convolution(kind):
    """With the same parameters, walking the state along and convolving with its response are the same mixer."""
    scan, whole = (
        build_mixer(
            MixerConfig.model_validate({"kind": kind, "hidden_size": SIZE, "state_size": 8, "form": form})
        ).double()
        for form in ("scan", "convolution")
    )
    whole.load_state_dict(scan.state_dict())
    x = torch.randn(2, 130, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(whole(x, LocalSequenceOps())[0], scan(x, LocalSequenceOps())[0])


def test_a_learned_transition_learns():
    """LSSL's matrix is a parameter that gets a gradient where it is learned, and a fixed one where it is not."""
    x = torch.randn(1, 70, SIZE, generator=torch.Generator().manual_seed(0))
    for transition in ("learned", "fixed"):
        values = {"kind": "lssl", "hidden_size": SIZE, "state_size": 4, "transition": transition}
        mixer = build_mixer(MixerConfig.model_validate(values))
        mixer(x, LocalSequenceOps())[0].square().sum().backward()
        learned = dict(mixer.named_parameters()).get("a_NN")
        assert (learned is not None) == (transition == "learned")
        assert learned is None or bool(learned.grad.abs().sum() > 0)


@pytest.mark.parametrize("values", [{"alpha": 0.0, "state_size": 8, "dt_max": 0.2}, {"alpha": 0.5}, {"alpha": 1.0}])
def test_steps_that_a_rule_allows_stay_finite(values):
    """Within the longest steps of its rule a fixed LSSL is finite after 4,096 tokens."""
    torch.manual_seed(0)
    mixer = build_mixer(MixerConfig.model_validate({"kind": "lssl", "hidden_size": 2, **values}))
    with torch.no_grad():
        mixer.log_dt_D.fill_(math.log(mixer.config.dt_max))
        y, state = mixer(torch.randn(1, 4096, 2), LocalSequenceOps())
    assert y.isfinite().all()
    assert state.x.isfinite().all()


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "s4d", "state_size": 7},
        {"kind": "s4d", "bidirectional": True},
        {"kind": "lssl", "alpha": 1.5},
        {"kind": "s4d", "dt_min": 0.2, "dt_max": 0.1},
        {"kind": "s4", "dt_max": float("inf")},
        {"kind": "lssl", "alpha": 0.0},
        {"kind": "lssl", "alpha": 0.25, "state_size": 8, "dt_max": 0.51},
        {"kind": "sgconv", "length": 8, "decay": 0.0},
        {"kind": "sgconv", "length": 8, "decay": float("nan")},
        {"kind": "sgconv", "length": 8, "decay": [1.0, float("inf")]},
        {"kind": "fnet", "norm": "forward"},
    ],
)
def test_bad_configurations_are_refused(values):
    """Odd states, scans that look ahead, steps out of order or too long, no decay are refused."""
    with pytest.raises(ValidationError):
        MixerConfig.model_validate({"hidden_size": SIZE, **values})
