"""This node among the nodes of its job: who has what, and who asks whom."""
