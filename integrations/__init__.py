"""Bridges from tokred to serving engines and evaluation harnesses."""
