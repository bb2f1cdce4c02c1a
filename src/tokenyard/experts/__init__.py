"""Experts: they compute on the rows that a rank received."""
