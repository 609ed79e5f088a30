"""The nodes of a job side by side. Pure."""
