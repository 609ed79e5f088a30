"""The programs lead and agent: they bring the other nodes of a run up and end them."""
