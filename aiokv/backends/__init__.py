"""Copies between the tiers and their completion. Nothing above this package knows which backend runs."""
