"""The staging process of a node: queue (pure), copiers, store, socket server, lifecycle."""
