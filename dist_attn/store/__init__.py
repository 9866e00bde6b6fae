"""Stored states: snapshots by their content, and the sessions that refer to them; never imports torch.

Two things differ from place to place, and each is a small interface (`ports.py`): ordered records that change in
transactions, and blobs of bytes that stream. Memory, local disk and Redis implement both; all rules
(who may see what, quotas, references, expiry, eviction) are written once, above them.
"""

from dist_attn.store.entries import Append, Checkpoint, Reached, Session, SnapshotInfo, StoreLimits, Usage
from dist_attn.store.open import StateStore, open_records, open_store
from dist_attn.store.prefixes import PrefixHasher
from dist_attn.store.upkeep import ExpiryGrace

__all__ = [
    "Append",
    "Checkpoint",
    "ExpiryGrace",
    "PrefixHasher",
    "Reached",
    "Session",
    "SnapshotInfo",
    "StateStore",
    "StoreLimits",
    "Usage",
    "open_records",
    "open_store",
]
