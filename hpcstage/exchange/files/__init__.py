"""Passes staged files as messages between exchanges: reads, sends, receives and publishes them."""
