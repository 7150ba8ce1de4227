"""TPUs through JAX, torchax and Pallas; the same code runs on JAX's processor back end, for tests."""
