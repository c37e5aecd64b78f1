"""Kept rows back into verl's actor update; torch is imported here, and verl inside functions."""
