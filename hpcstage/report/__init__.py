"""Turns records and plans into terminal text and JSON."""
