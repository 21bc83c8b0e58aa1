"""The page that shows how a run went, and what is kept of a run for it."""
