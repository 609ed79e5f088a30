"""Events and their aggregation into the record, the one machine-readable result of a run."""
