"""Helpers shared by the packages of jaxkv. No stability guarantees."""
