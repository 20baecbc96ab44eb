"""Thin commands. What takes seconds to import stands inside of the functions that need it, so that help is instant."""
