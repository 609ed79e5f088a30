"""Holds what runs in the training process. Its files are copied to a private directory; nothing here imports hpcstage.
hpcstage."""
