"""Record in; terminal text and JSON out."""
