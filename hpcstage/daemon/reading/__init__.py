"""What the program reads and will read: opens, announced orders, the order that follows."""
