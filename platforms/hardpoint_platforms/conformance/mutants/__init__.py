"""Seeded faults: the reference platform with one thing wrong each. The kit must catch every one of them."""
