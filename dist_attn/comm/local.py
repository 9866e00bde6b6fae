"""A group of one rank: every exchange is a copy."""

from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import ExchangeCall, Pending
from dist_attn.errors import MismatchError

__all__ = ["LocalCommunicator"]


@final
class LocalCommunicator(Communicator):
    """The only rank of a group of one."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, backend="local", timeout_s=0.0)

    def _gather(self, call: ExchangeCall, sent: Tensor) -> Pending:
        copy = sent.clone()
        return Pending(lambda: copy)

    def _exchange(self, call: ExchangeCall, sent: Tensor, send_bytes: list[int], recv_bytes: list[int]) -> Pending:
        if send_bytes != recv_bytes:
            raise MismatchError(f"{call}: the only rank sends itself {send_bytes} bytes but expects {recv_bytes}")
        copy = sent.clone()
        return Pending(lambda: copy)

    def _send_receive(
        self, call: ExchangeCall, sent: Tensor, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int]
    ) -> Pending:
        return Pending(sent.clone)  # no partners, so no bytes

    def _broadcast(self, call: ExchangeCall, sent: Tensor, source: int) -> Tensor:
        return sent.clone()

    def _subgroup(self, groups: Sequence[tuple[int, ...]]) -> Communicator:
        return LocalCommunicator()

    def close(self) -> None:
        """Do nothing: there is no group to leave."""
