"""The method: keys, search, recall, combine, remember."""
