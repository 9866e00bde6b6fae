"""The settings of a start, as a table or as JSON: every value and where it comes from."""

import json
import os
from pathlib import Path

from dist_attn.commands.tables import Table, print_tables
from dist_attn.settings import read_settings

__all__ = ["show_settings"]


def show_settings(config: Path | None, *, as_json: bool) -> None:
    """Print what `dist-attn serve` would be told by this file and the environment; of keys only their number.

    Raises: ConfigError for an unknown key or a value that is not accepted.
    """
    rows = list(read_settings(config, environment=os.environ).rows())
    if as_json:
        print(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}))
        return
    cells = [(key, "" if value is None else str(value), origin) for key, value, origin in rows]
    notes = [
        "a file is given by --config or DIST_ATTN_CONFIG; in the environment http.port is DIST_ATTN_HTTP__PORT",
        "flags of `dist-attn serve` come over the environment, and this over the file",
    ]
    print_tables("settings", [Table("in the order of the file", cells, ("key", "value", "from"))], notes)
