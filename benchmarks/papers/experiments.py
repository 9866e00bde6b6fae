"""All experiments by name, in the order of the papers."""

from benchmarks.papers.experiment import Experiment

__all__ = ["EXPERIMENTS"]

_ALL: tuple[Experiment, ...] = ()
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}
