"""Who trains: the membership of an elastic training, agreed on by the agents of `torchrun` on its hosts."""
