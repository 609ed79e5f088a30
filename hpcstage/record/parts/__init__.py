"""Defines the parts of wrapper and nodes from which the record is composed, and keeps the index of runs."""
