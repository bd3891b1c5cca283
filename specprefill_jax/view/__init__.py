"""Showing what was read: a prompt as a map of kept and dropped text, in a terminal or as a page, and the phases."""
