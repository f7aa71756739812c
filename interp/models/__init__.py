"""The hooked sequence models: one file an architecture, one contract for all."""
