"""Trackers: what they are (`base`), how they are fed (`feed`), and one lazily imported file for each."""

from __future__ import annotations

from .callback import Tracking as Tracking
