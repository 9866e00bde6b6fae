"""The settings of a start, as a table or as JSON: every value, where it comes from, and what it is."""

import json
import os
from pathlib import Path

from dist_attn.commands.tables import Table, print_tables
from dist_attn.settings import read_settings, settings_words

__all__ = ["show_settings"]


def show_settings(config: Path | None, *, as_json: bool) -> None:
    """Print what `dist-attn serve` would be told by this file and the environment; of keys only their number.

    Raises: ConfigError for an unknown key or a value that is not accepted.
    """
    rows, words = list(read_settings(config, environment=os.environ).rows()), settings_words()
    if as_json:
        print(json.dumps({key: {"value": value, "origin": origin, "what": words[key]} for key, value, origin in rows}))
        return
    cells = [(key, "" if value is None else str(value), origin, words[key]) for key, value, origin in rows]
    notes = [
        "a file is given by --config or DIST_ATTN_CONFIG; in the environment http.port is DIST_ATTN_HTTP__PORT",
        "flags of `dist-attn serve` come over the environment, and this over the file",
    ]
    table = Table("in the order of the file", cells, ("key", "value", "from", "what"), texts=(0, 3))
    print_tables("settings", [table], notes)
