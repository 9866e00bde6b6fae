"""The papers' tables and figures at small scale: `python -m benchmarks.papers NAME` trains, measures and files."""
