"""Forecasts how long the modes would take. Pure."""
