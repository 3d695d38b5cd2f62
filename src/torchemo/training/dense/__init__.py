"""Classification of all base classes: before the episodes, or beside them."""
