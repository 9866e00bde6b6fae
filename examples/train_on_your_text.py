"""Train a model on your own text, with a vocabulary of its own, and let it write.

    python examples/train_on_your_text.py book.txt notes/ --out runs/mine --steps 500

Ctrl-C saves and ends; the same command with --resume goes on. The folder OUT/run/model then serves:
`dist-attn serve --model OUT/run/model`. The last twentieth of the text is kept for validation.
"""

import argparse
import sys
from pathlib import Path

from dist_attn.commands.train import train_here
from dist_attn.errors import DistAttnError, InputError
from dist_attn.generation.text import generate_text
from dist_attn.text import train_bpe
from dist_attn.training import TrainingConfig
from dist_attn.wire.messages import SamplingSpec


def main() -> int:
    """Collect, make a vocabulary, train, write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="text files, or folders with *.txt in and below them")
    parser.add_argument("--out", type=Path, default=Path("runs/own"))
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens, 258 or more")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--segment", type=int, default=256, help="tokens of a row; the state is carried from one to the next"
    )
    parser.add_argument("--batch", type=int, default=4, help="rows that are read side by side")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    if not options.resume:
        prepare(options.texts, options.out, options.vocabulary)
    said, code = train_here(configuration(options), resume=options.resume)
    if code:
        print(said)
        return code

    folder = options.out / "run" / "model"
    prompt = (options.out / "validation.txt").read_bytes()[:200]
    print(f"\n--- {folder} goes on with the text that was kept apart:\n{prompt.decode(errors='replace')}|", end="")
    generate_text(
        str(folder), prompt, SamplingSpec(max_tokens=80, temperature=0.8, seed=0), lambda text: print(text, end="")
    )
    print()
    return 0


def prepare(texts: list[Path], out: Path, vocabulary: int) -> None:
    """One text to train on and one to validate by, and a vocabulary of the first."""
    files = [file for path in texts for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])]
    whole = b"\n".join(file.read_bytes() for file in files)
    if len(whole) < 10_000:
        raise InputError(f"{len(files)} file(s) have {len(whole)} bytes; give at least 10,000, better a million")
    cut = whole.rfind(b"\n", 0, len(whole) * 19 // 20) + 1 or len(whole) * 19 // 20
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.txt").write_bytes(whole[:cut])
    (out / "validation.txt").write_bytes(whole[cut:])
    train_bpe([out / "train.txt"], vocabulary).save(out)
    print(f"{len(files)} file(s), {len(whole):,} bytes, of which {len(whole) - cut:,} validate; vocabulary in {out}")


def configuration(options: argparse.Namespace) -> TrainingConfig:
    """What `dist-attn train` would read from a file; examples/train-books.toml says more of each key."""
    from dist_attn.text import load_tokeniser

    heads = max(1, options.width // 64)
    mixer = {
        "kind": "rfa_gate",
        "hidden_size": options.width,
        "num_heads": heads,
        "num_random": 64,
        "short_convolution": 4,
    }
    return TrainingConfig.model_validate(
        {
            "model": {
                "vocab_size": load_tokeniser(options.out).vocab_size,  # less than asked for, if little repeats
                "hidden_size": options.width,
                "num_layers": options.layers,
                "mlp_size": 4 * options.width,
                "mixer": mixer,
            },
            "data": {
                "folder": options.out,
                "train": ["train.txt"],
                "validation": "validation.txt",
                "tokeniser": options.out,
                "batch": options.batch,
                "segment": options.segment,
            },
            "optimiser": {
                "kind": "muon",
                "learning_rate": 4e-3,
                "matrix_learning_rate": 3e-3,
                "warmup_steps": min(20, options.steps),
            },
            "run": {
                "folder": options.out / "run",
                "steps": options.steps,
                "evaluate_every": max(1, options.steps // 5),
                "checkpoint_every": max(1, options.steps // 5),
            },
        }
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DistAttnError, OSError) as error:
        sys.exit(f"train_on_your_text: {error}")
