"""Readers of single file formats, without a dataset's layout."""
