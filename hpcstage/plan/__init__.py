"""Makes the plan: manifest, order, placement, forecast. It is pure, except that `dataset` looks at the source, and that
manifests, orders and traces are read from and written to files."""
