"""torch's own tables, swept: `python -m bench.operators`."""
