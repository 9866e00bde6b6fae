"""Grammars of clients' forms, written and tried in a process with bounds: some 70 bytes may take minutes to prepare."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dist_attn.errors import GrammarError
from dist_attn.text.grammars import GrammarKind, find_library
from dist_attn_service.base.errors import Code, ServiceError, retry_after
from dist_attn_service.completions.form_program import MEMORY_BYTES, MOST_SECONDS

MOST_CHARACTERS = 1 << 18  # of a form as it is sent
WALL_SECONDS = 30.0  # for a start on a busy machine; usually it takes a third of a second
PROCESSES, WAIT_SECONDS = 2, 5.0  # at once, and of waiting for one to end
_places = threading.BoundedSemaphore(PROCESSES)


def bounded_grammar(kind: GrammarKind, content: str | Mapping[str, Any]) -> str:
    """The grammar of a form that takes little time and memory to prepare; one that is sent again costs nothing.

    Raises: GrammarError naming the fault; ServiceError where the machine is too busy to tell.
    """
    find_library()
    try:
        form = json.dumps([kind, content])
    except RecursionError:
        raise GrammarError("it lies too deep within itself: recursion") from None
    if len(form) > MOST_CHARACTERS:
        raise GrammarError(f"it has {len(form)} characters; at most {MOST_CHARACTERS} are taken")
    return _tried(form)


@lru_cache(maxsize=128)
def _tried(form: str) -> str:
    program = [sys.executable, "-m", "dist_attn_service.completions.form_program"]
    few_threads = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each takes of the bounded memory
    if not _places.acquire(timeout=WAIT_SECONDS):
        raise _busy(f"{PROCESSES} other forms are being tried")
    try:  # a session of its own: a Ctrl-C in the terminal is for the service alone
        done = subprocess.run(
            program, input=form.encode(), capture_output=True, timeout=WALL_SECONDS, env=few_threads,
            start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _busy(type(error).__name__) from None
    finally:
        _places.release()
    if done.returncode:
        why = (
            f"takes longer than {MOST_SECONDS:g} s"
            if done.returncode == -signal.SIGPROF
            else f"ends its process ({done.returncode}), of {MEMORY_BYTES >> 20} MiB,"
        )
        raise GrammarError(f"the form {why} to prepare: make it smaller, such as multipleOf, patterns or counts")
    answer = json.loads(done.stdout)
    if answer["refusal"]:
        raise GrammarError(answer["refusal"])
    return str(answer["grammar"])


def _busy(why: str) -> ServiceError:
    words = f"the form cannot be tried now ({why}); try again"
    return ServiceError(words, code=Code.OVERLOADED, headers=retry_after(WALL_SECONDS))
