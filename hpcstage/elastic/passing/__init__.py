"""Passes copies of staged files from the nodes of a training to those of jobs that join it: giver and receiver are
processes beside an agent of `torchrun`, which bring each other together through the training's store."""
