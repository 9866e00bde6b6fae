"""States of prompts at the fake engine: a state is the tokens it stands after, in a real snapshot file."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dist_attn.errors import StateDamagedError, StateMismatchError, WireError
from dist_attn.wire.manifest import RestoreReport, require_same_model
from dist_attn.wire.messages import AnyMessage, Checkpoint, Failed, OpenWork, Restored
from dist_attn.wire.snapshot import SnapshotParser, pack_snapshot
from tests.support.fake_sessions import MANIFEST, refusal_of
from tests.support.fake_store import FakeStore

__all__ = ["FakePrompts", "prompt_state"]

Tokens = npt.NDArray[np.int32]


def prompt_state(tokens: Tokens) -> bytes:
    """The stored state after these tokens."""
    arrays = [("layers.0.0", np.ascontiguousarray(tokens, dtype="<i4"))]
    return b"".join(pack_snapshot(MANIFEST, len(tokens), arrays).pieces())


@dataclass
class FakePrompts:
    """States that completions begin with and that they hand out.

    `refuse` is the code that states are refused with; `mute` takes them and says nothing.
    """

    refuse: str | None = None
    mute: bool = False
    store: FakeStore = field(default_factory=FakeStore)

    def begin(self, message: OpenWork) -> tuple[Tokens | None, list[AnyMessage]]:
        """The tokens that the state stands after, and what is said of it."""
        begin, name = message.begin, message.request_id
        assert begin is not None
        if self.mute:
            return None, []
        parser = SnapshotParser(keep=True)
        try:
            parser.feed(self.store.get(begin))
            snapshot = parser.finish()
            require_same_model(snapshot.header.manifest.model, MANIFEST.model)
        except (WireError, StateMismatchError, StateDamagedError) as error:
            return None, [Failed(name, refusal_of(error), str(error))]
        if self.refuse is not None:
            return None, [Failed(name, self.refuse, "refused by the test")]
        tokens = snapshot.arrays["layers.0.0"].astype(np.int32)
        assert len(tokens) == begin.position == snapshot.header.position
        return tokens, [Restored(name, RestoreReport(begin.position, 0, True, ""))]

    def kept(self, name: str, tokens: Tokens, positions: tuple[int, ...]) -> list[AnyMessage]:
        """The states at these positions, which are in the store."""
        return [
            Checkpoint(name, position, 0, *self.store.put(prompt_state(tokens[:position]))) for position in positions
        ]
