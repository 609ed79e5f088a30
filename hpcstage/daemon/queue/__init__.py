"""Decides which file is copied next and how a want is answered. Pure."""
