"""What must be shown, one command each: `python -m benchmarks.NAME [--quick] [--json FILE] [--check]`."""
