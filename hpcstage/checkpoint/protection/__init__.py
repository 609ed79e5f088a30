"""Generations that outlive lost nodes: which nodes protect each other, parities of what they hold, and the way back."""
