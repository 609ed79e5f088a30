"""What is copied next, and what a want is told. Pure."""
