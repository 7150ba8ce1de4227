"""Layers: each binds its ops once, at construction, and is called with the weights passed in."""
