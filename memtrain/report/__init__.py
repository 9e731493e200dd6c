"""Rows of studies and runs, shown."""
