"""Checks of the slow-storage emulator (hpcstage.emulator): what it passes unthrottled and how exact its model is."""
