"""Stored states: snapshots by their content, and the sessions that refer to them; never imports torch.

Two things differ from place to place, and each is a small interface: ordered records that change in transactions
(`records.py`) and blobs of bytes that stream (`blobs.py`). Memory, local disk and Redis implement both; all rules
(who may see what, quotas, references, expiry, eviction) are written once, above them.
"""

from dist_attn.store.entries import Append, Checkpoint, Session, SnapshotInfo, StoreLimits, Usage
from dist_attn.store.grace import ExpiryGrace
from dist_attn.store.open import open_records
from dist_attn.store.prefixes import PrefixHasher
from dist_attn.store.state_store import StateStore, open_store

__all__ = [
    "Append",
    "Checkpoint",
    "ExpiryGrace",
    "PrefixHasher",
    "Session",
    "SnapshotInfo",
    "StateStore",
    "StoreLimits",
    "Usage",
    "open_records",
    "open_store",
]
