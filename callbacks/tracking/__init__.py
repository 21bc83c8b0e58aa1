"""Trackers: what they are (`base`), how they are fed (`feed`), and one file for each."""
