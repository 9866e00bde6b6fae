"""Configurations of the built-in mixers, with their costs: every file here is loaded and registers what it has."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
