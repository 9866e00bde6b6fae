"""Ranks that exchange tensors: one `Communicator` interface over local, simulated, torch.distributed and MPI ranks."""

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import Event, ExchangeTraffic, Pending
from dist_attn.comm.open import Rendezvous, open_communicator
from dist_attn.comm.simulated import run_simulated

__all__ = ["Communicator", "Event", "Pending", "Rendezvous", "ExchangeTraffic", "open_communicator", "run_simulated"]
