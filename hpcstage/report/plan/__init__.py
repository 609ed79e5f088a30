"""Prints a plan for people and for programs."""
