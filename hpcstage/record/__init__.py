"""The room that composes the record, the one machine-readable result of a run, from what wrapper and nodes report."""
