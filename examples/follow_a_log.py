"""Follow a growing log file, like `tail -f`, and show the lines that surprise a model which has read all lines before.

    python examples/follow_a_log.py /var/log/syslog

The model's state takes each new line in and keeps its size, so a line of the second week costs what the first one did.
A line is shown when it takes many more bits per byte than lines did lately. No service is needed.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dist_attn.checkpoints import load_model_and_tokeniser, resolve_model_folder
from dist_attn.errors import DistAttnError

PAUSE_S = 0.2
LEARNED_FIRST = 20  # lines: before them nothing is usual yet
MEMORY = 100  # lines over which "lately" reaches


def main() -> None:
    """Read line after line, print what surprises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--above", type=float, default=3.0, help="deviations above the mean that make a line shown")
    parser.add_argument("--idle", type=float, default=math.inf, help="stop after so many seconds without a new line")
    parser.add_argument("--model", default=None, help="a model folder or the name of a shipped model")
    options = parser.parse_args()

    model, tokeniser = load_model_and_tokeniser(resolve_model_folder(options.model))
    state = model.initial_state(1)
    logits_V = torch.zeros(model.config.vocab_size)  # before the first token nothing is likelier than anything else
    mean, variance, count = 0.0, 0.0, 0
    for line in lines_of(options.file, options.idle):
        tokens_L = torch.from_numpy(tokeniser.encode(line)).long()
        with torch.inference_mode():
            logits_BLV, state = model(tokens_L[None], state=state)
        before_LV = torch.cat([logits_V[None], logits_BLV[0, :-1]])
        nats = torch.nn.functional.cross_entropy(before_LV, tokens_L, reduction="sum").item()
        logits_V = logits_BLV[0, -1]

        bits = nats / math.log(2) / len(line)  # per byte
        deviation = (bits - mean) / math.sqrt(variance) if variance > 0 else 0.0
        if count >= LEARNED_FIRST and deviation > options.above:
            print(f"line {count + 1}: {bits:.2f} bits per byte, {deviation:.1f} deviations: {shown(line)}", flush=True)
        weight = max(1 / (count + 1), 1 / MEMORY)
        mean, variance = mean + weight * (bits - mean), (1 - weight) * (variance + weight * (bits - mean) ** 2)
        count += 1
    print(f"{count} lines, {mean:.2f} bits per byte lately; the state has {state.num_bytes():,} bytes")


def lines_of(path: Path, idle_s: float) -> Iterator[bytes]:
    """Whole lines, as they come; ends when none has come for so long."""
    last, begun = time.monotonic(), b""
    with path.open("rb") as file:
        while time.monotonic() - last < idle_s:
            piece = file.readline()
            begun += piece
            if begun.endswith(b"\n"):
                yield begun
                last, begun = time.monotonic(), b""
            elif not piece:
                time.sleep(PAUSE_S)


def shown(line: bytes) -> str:
    """A line for a terminal: what is no printable character is replaced."""
    return "".join(c if c.isprintable() else "�" for c in line.decode(errors="replace").strip())[:160]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (DistAttnError, OSError) as error:
        sys.exit(f"follow_a_log: {error}")
