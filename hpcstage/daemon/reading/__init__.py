"""Follows what the program reads and says that it will read, and sets the order by it."""
