"""The programs lead and agent bring the other nodes of a run up and end them."""
