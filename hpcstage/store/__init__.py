"""The node-local store of copies: its directory, its files, what it holds. Owns no decision."""
