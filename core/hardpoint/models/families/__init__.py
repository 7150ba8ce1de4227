"""One file per family of architectures: a config dict in, a `ModelSpec` out."""
