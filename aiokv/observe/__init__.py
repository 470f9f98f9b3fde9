"""Counters, metrics and published events."""
