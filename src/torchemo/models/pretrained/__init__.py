"""Pretrained networks: frozen, they turn images into features; what trains is a small network on these."""
