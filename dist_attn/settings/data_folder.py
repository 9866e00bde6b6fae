"""The names in a service's data folder."""

from enum import StrEnum


class DataFolder(StrEnum):
    """Everything that lies in `data_dir`: a folder with anything else in it is not a service's alone."""

    STATES = "states"
    JOBS = "jobs"
    FILES = "files"
    SPOOL = "spool"
    ENCODER = "encoder"
    LOCK = "serve.lock"
