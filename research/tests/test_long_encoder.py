"""The long encoder: what the student takes from its teacher, its losses by definition, and a run that goes on."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dist_attn.checkpoints import load_text_encoder
from dist_attn.conversion import convert_folder
from dist_attn.models import TextEncoder
from dist_attn_research.long_encoder.distil import distillation_loss, nearness_loss, read_teacher, span_means
from dist_attn_research.long_encoder.student import begin_student
from dist_attn_research.long_encoder.train import _groups, _resume, _save
from tests.support.sentence_encoders import write_sentence_encoder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    """A small sentence encoder."""
    folder = tmp_path_factory.mktemp("teacher")
    write_sentence_encoder(folder / "theirs")
    convert_folder(folder / "theirs", folder / "ours")
    return load_text_encoder(folder / "ours")


def _tokens(teacher: TextEncoder, batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, teacher.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


def test_the_student_begins_with_its_teacher_and_streams(teacher: TextEncoder) -> None:
    """Projections and feed-forward layers are the teacher's, and a text in two pieces has the states of the whole."""
    student = begin_student(teacher)
    for own, block in zip(student.blocks, teacher.encoder.blocks, strict=True):
        for name in ("mixer.qkv.weight", "mixer.out.bias", "mlp_in.weight", "mlp_out.weight", "mlp_norm.bias"):
            assert torch.equal(own.state_dict()[name], block.state_dict()[name])
    tokens_BL = _tokens(teacher, 2, 12)
    with torch.inference_mode():
        whole_BLD, _ = student.hidden(tokens_BL)
        first_BLD, state = student.hidden(tokens_BL[:, :5])
        second_BLD, _ = student.hidden(tokens_BL[:, 5:], state=state)
    torch.testing.assert_close(torch.cat([first_BLD, second_BLD], 1), whole_BLD, atol=1e-4, rtol=1e-4)


def test_the_teacher_read_layer_by_layer_gives_its_vector(teacher: TextEncoder) -> None:
    """The mean of the last layer's tokens within the frame, with those of the frame, is the teacher's vector."""
    tokens_BL = _tokens(teacher, 3, 9)
    layers = read_teacher(teacher, tokens_BL)
    framed = teacher.frame(tokens_BL)
    with torch.inference_mode():
        want_BLD = teacher.hidden(framed)[:, len(teacher.config.prefix) :][:, :9]
    assert len(layers) == teacher.config.encoder.num_layers
    torch.testing.assert_close(layers[-1], want_BLD, atol=1e-5, rtol=1e-5)


def test_nearness_is_a_divergence_of_distributions_over_the_others() -> None:
    """It is 0 for the teacher's own vectors, and otherwise the sum over all others of p log(p / q)."""
    own, target = (F.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(n)), dim=-1) for n in (0, 1))
    assert float(nearness_loss(target, target)) == pytest.approx(0, abs=1e-6)
    want = 0.0
    for i in range(4):
        others = [j for j in range(4) if j != i]
        p, q = (torch.softmax(torch.stack([v[i] @ v[j] for j in others]) / 0.05, 0) for v in (target, own))
        want += float((p * (p / q).log()).sum()) / 4
    assert float(nearness_loss(own, target)) == pytest.approx(want, rel=1e-4)


def test_a_span_is_the_direction_of_its_tokens_mean() -> None:
    """Whole spans alone count, each of length 1."""
    h_BLD = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))
    got_BSD = span_means(h_BLD, 3)
    assert got_BSD.shape == (2, 2, 3)
    torch.testing.assert_close(got_BSD[1, 1], F.normalize(h_BLD[1, 3:6].mean(0), dim=0))


def test_a_run_goes_on_from_its_checkpoint_bit_by_bit(teacher: TextEncoder, tmp_path: Path) -> None:
    """A step behind a checkpoint that was read gives the weights of a step that was never interrupted."""
    weights = []
    for killed in (False, True):
        torch.manual_seed(0)  # of the gates' first weights
        student = begin_student(teacher)
        optimiser = torch.optim.AdamW(_groups(student))
        for step in range(2):
            if killed and step:
                _save(tmp_path, student, optimiser, step)
                student = begin_student(teacher)
                optimiser = torch.optim.AdamW(_groups(student))
                assert _resume(tmp_path, student, optimiser) == step
            loss, parts = distillation_loss(student, teacher, _tokens(teacher, 4, 8 + step))
            assert parts.keys() == {"whole", "spans", "tokens", "contrast"}
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        weights.append(student.state_dict())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
