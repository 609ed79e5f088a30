"""The plan: manifest, order, placement, forecast. Data in, data out; only the scan touches the disk."""
