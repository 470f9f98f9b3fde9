"""Placeholder."""
def register(bench): pass
