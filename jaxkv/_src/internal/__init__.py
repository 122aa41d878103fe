"""Helpers shared by the rooms of jaxkv. No stability guarantees."""
