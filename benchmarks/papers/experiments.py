"""All experiments by name, in the order of the papers."""

from benchmarks.papers.context_length import CONTEXT_LENGTH
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.rfa_table1 import RFA_TABLE1
from benchmarks.papers.rfa_table3_speed import RFA_TABLE3_SPEED

__all__ = ["EXPERIMENTS"]

_ALL: tuple[Experiment, ...] = (
    RFA_TABLE1,
    RFA_TABLE3_SPEED,
    CONTEXT_LENGTH,
)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}
