"""Measuring an engine: arms side by side, one rank alone on a GPU."""
