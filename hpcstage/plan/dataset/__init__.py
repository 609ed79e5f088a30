"""Which files a run reads: arguments, scan, manifest. Only the scan touches the disk."""
