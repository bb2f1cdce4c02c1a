"""Forecasts of whether another placement of the experts pays, from the recorded routes of a real run."""
