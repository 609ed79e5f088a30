"""What the modes would take. Pure."""
