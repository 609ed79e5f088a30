"""This node among the nodes of its job: which node has which files, and which node asks which."""
