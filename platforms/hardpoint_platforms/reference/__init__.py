"""Every op contract in plain PyTorch: the oracle of the tests, the fallback of every device, and a tutorial."""
