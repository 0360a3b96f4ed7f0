"""What programs cost and gain: `python -m bench.programs --help`."""
