"""`python -m dist_attn_papers [NAME …]`: whatever can be measured, by name; this is what `dist-attn bench` starts.

An experiment and a program get all that follows their names; cases and studies are those of `benchmarks.run`.
"""

import importlib
import sys
from collections.abc import Sequence

from benchmarks import run
from dist_attn_papers.studies import STUDIES
from dist_attn_papers.tables import __main__ as papers
from dist_attn_papers.tables.experiments import EXPERIMENTS

# Modules with a `main` of their own, and what each asks.
PROGRAMS = {
    "filed": ("filed", "What was measured last? Prints the tables of all that is filed."),
    "writer": ("writer.prepare", "Make the texts, the vocabulary and the first weights of the model that writes."),
    "writer-store": ("writer.store", "Put the weights of a run of the model that writes into the folder that ships."),
    "retrieval": ("retrieval.program", "Do words, MiniLM and our models find chapters, speeches, words and verses?"),
    "service-promises": ("service.promises", "Does the service keep what it promises? All of it, by its measurements."),
    "service-kills": ("service.kills", "Are answers the same when ranks are killed under open streams?"),
    "service-stops": ("service.stops", "How soon is a stopped rank named, and are there false alarms?"),
    "service-sessions": ("service.sessions", "Do sessions outlive their processes, bit by bit?"),
    "service-streaming": ("service.streaming", "What does a gigabyte through the API cost it?"),
    "service-disconnects": ("service.disconnects", "How long does work go on for a client that left?"),
    "service-eta": ("service.eta", "How near are the times that a service estimates?"),
    "service-load": ("service.load", "How many tokens a second do many clients draw?"),
    "page-upload": ("page.upload", "What does a tab hold while it sends a large file?"),
    "page-tokens": ("page.tokens", "What does a tab hold after a million drawn tokens?"),
    "page-screenshots": ("page.screenshots", "What does the page look like?"),
    "gpu-longest": ("gpu.longest", "How long an attention do four ranks of 24 GB on one GPU hold?"),
    "gpu-relative": ("gpu.relative_check", "Are relative attention's kernels right on this GPU?"),
    "kernel-registers": ("gpu.kernel_registers", "How many registers do the GPU's kernels take?"),
}


def main(arguments: Sequence[str]) -> int:
    """The exit code of what was started: 0 when it is done, 2 for input that is wrong or missing.

    Of experiments also 3: not all is done yet.
    """
    name = arguments[0] if arguments else ""
    if name in EXPERIMENTS:
        return papers.main(arguments)
    if name in PROGRAMS:
        module = importlib.import_module(f"dist_attn_papers.{PROGRAMS[name][0]}")
        return int(module.main(list(arguments[1:])) or 0)
    questions = {one.name: one.question for one in EXPERIMENTS.values()}
    return run.main(arguments, STUDIES, questions | {name: question for name, (_, question) in PROGRAMS.items()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
