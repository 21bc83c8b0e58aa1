"""Trackers: what they are (`base`), how they are fed (`feed`), and one lazily imported file for each."""

from .callback import Tracking as Tracking
