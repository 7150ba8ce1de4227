"""Ops in plain PyTorch whose shapes follow from the bucket alone: nothing is read back, nothing is written in place.

They work on state trees as `DenseStateCache` lays them out and return new ones. The platform `strict` runs them, and a
plugin whose compiler traces PyTorch can take them as they are.
"""
