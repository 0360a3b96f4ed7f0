"""Costs and gains of programs: `python -m bench.programs --help`."""
