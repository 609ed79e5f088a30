"""All that two programs of hpcstage tell each other. No behaviour."""
