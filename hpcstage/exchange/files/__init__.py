"""Staged files as messages between exchanges: read, sent, received, published."""
