"""Learns what the program reads and will read, from its opens and its announcements, and sets the order by it."""
