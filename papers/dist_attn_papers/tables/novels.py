"""The novels: which there are, which no language model is trained on, and where they lie."""

from pathlib import Path

from dist_attn.errors import ConfigError

__all__ = ["DEVELOPMENT", "FOLDER", "NOVELS", "TEST", "find_novel"]

FOLDER = Path("data/books")
NOVELS = (
    "anna_karenina.txt",
    "bleak_house.txt",
    "brothers_karamazov.txt",
    "crime_and_punishment.txt",
    "david_copperfield.txt",
    "don_quixote.txt",
    "emma.txt",
    "great_expectations.txt",
    "jane_eyre.txt",
    "les_miserables.txt",
    "middlemarch.txt",
    "moby_dick.txt",
    "pride_and_prejudice.txt",
    "tale_of_two_cities.txt",
    "vanity_fair.txt",
    "war_and_peace.txt",
)
# No language model is trained on TEST; on DEVELOPMENT none where an experiment has such a set.
DEVELOPMENT, TEST = "great_expectations.txt", "war_and_peace.txt"


def find_novel(name: str, folder: Path = FOLDER) -> Path:
    """The file of a novel.

    Raises: ConfigError where it is missing.
    """
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"{path} is not there; put the novels into {folder}, as examples/train-books.toml has them")
    return path
