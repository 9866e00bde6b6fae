"""Where processes that a test starts find this project's packages, whichever checkout is installed."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_PATH = os.pathsep.join(str(ROOT / folder) for folder in ("", "service", "client", "papers"))
"""A value of PYTHONPATH."""
