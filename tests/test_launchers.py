"""What launchers say: rank and size in each dialect, who speaks for all, and words that cannot be read."""

import pytest

from dist_attn.errors import ConfigError
from dist_attn.launchers import is_first_rank, read_launch


def test_nobody_started_it() -> None:
    """A process by itself has no launch, and speaks."""
    assert read_launch({}) is None
    assert is_first_rank({})


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "torchrun", 1, 2),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "mpiexec", 3, 4),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}, "mpiexec", 1, 2),
        ({"PMIX_RANK": "5"}, "mpiexec", 5, None),
        ({"WORLD_SIZE": "2"}, "torchrun", None, 2),
        ({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "1"}, "torchrun", 1, 2),
    ],
)
def test_each_dialect_is_understood(environ: dict[str, str], launcher: str, rank: int | None, size: int | None) -> None:
    """torchrun, MPICH, Open MPI and PMIx; what was not said is None; torchrun counts under an mpiexec."""
    launch = read_launch(environ)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.size) == (launcher, rank, size)
    assert is_first_rank(environ) == (not rank)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "1 or more"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "PMI_RANK is '-1'"),
    ],
)
def test_words_that_cannot_be_read_are_refused(environ: dict[str, str], says: str) -> None:
    """A rank or a size that is no number is a ConfigError that names the variable."""
    with pytest.raises(ConfigError, match=says):
        read_launch(environ)
