"""Grammars of clients' forms, written and tried in a process with bounds: some 70 bytes may take minutes to prepare."""

import json
import signal
import subprocess
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dist_attn.bounded_process import run_bounded
from dist_attn.errors import GrammarError, MissingExtraError
from dist_attn.text.grammars import GrammarKind, find_library
from dist_attn_service.base.errors import NO_RETRY, Code, ServiceError, retry_after
from dist_attn_service.completions import form_program
from dist_attn_service.completions.form_program import MEMORY_BYTES, MOST_SECONDS

MOST_CHARACTERS = 1 << 18  # of a form as it is sent
WALL_SECONDS = 30.0  # for a start on a busy machine; usually it takes a third of a second
PROCESSES, WAIT_SECONDS = 2, 5.0  # at once, and of waiting for one to end
_places = threading.BoundedSemaphore(PROCESSES)


def bounded_grammar(kind: GrammarKind, content: str | Mapping[str, Any]) -> str:
    """The grammar of a form that takes little time and memory to prepare; one that is sent again costs nothing.

    Raises: GrammarError naming the fault; ServiceError where the library is missing or the machine too busy to tell.
    """
    try:
        find_library()
        form = json.dumps([kind, content])
    except MissingExtraError as error:
        raise ServiceError(str(error), code=Code.UNSUPPORTED_PARAMETER, status=501, headers=NO_RETRY) from None
    except RecursionError:
        raise GrammarError("it lies too deep within itself: recursion") from None
    if len(form) > MOST_CHARACTERS:
        raise GrammarError(f"it has {len(form)} characters; at most {MOST_CHARACTERS} are taken")
    return _tried(form)


@lru_cache(maxsize=128)
def _tried(form: str) -> str:
    if not _places.acquire(timeout=WAIT_SECONDS):
        raise _busy(f"{PROCESSES} other forms are being tried")
    try:
        done = run_bounded(form_program.__name__, timeout_s=WALL_SECONDS, input=form.encode(), capture_output=True)
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
