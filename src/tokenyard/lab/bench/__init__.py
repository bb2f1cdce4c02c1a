"""Measurements, each beside its floor."""
