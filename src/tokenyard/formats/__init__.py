"""Formats: how rows and weights are encoded."""
