"""Decides which file is copied next and how a request is answered. Pure."""
