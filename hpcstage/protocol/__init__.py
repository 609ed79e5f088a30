"""The messages, specifications and shared memory between two programs of hpcstage. No behaviour."""
